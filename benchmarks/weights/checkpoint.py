"""Llama checkpoints of random weights that the benchmarks start, and their pages in the page cache.

A checkpoint is built on first use, in shards of at most 512 MB, with the tokenizer of `tiny-llama`. The default has 1.1
billion parameters in bfloat16 (2.05 GiB).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from coldstart.models import tiny
from coldstart.models.resolution import weight_files
from coldstart.system import paths

SEED = 20240607
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_LIBC = ctypes.CDLL(None, use_errno=True)


def home() -> Path:
    """Return the directory of the checkpoints below the cache; removing it frees the space."""
    return paths.Cache.at().root / "weights-benchmark"


def built(config: Mapping[str, Any] = CONFIG) -> Path:
    """Return the directory of the checkpoint of `config`, built on first use (about 20 s for the default)."""
    text = json.dumps(config, indent=1)
    final = home() / f"llama-{zlib.crc32(text.encode()):08x}"
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=final.parent))
        # A child: torch stays out of processes that are about to be measured.
        command = [sys.executable, "-m", "benchmarks.weights.checkpoint", str(draft), text]
        subprocess.run(command, cwd=ROOT, check=True)
        for file in tiny.build("tiny-llama", paths.Cache.at().models).glob("*token*"):
            shutil.copy(file, draft)
        draft.rename(final)
    return final


def size(directory: Path) -> int:
    """Return the bytes of all weight files."""
    return sum(file.stat().st_size for file in weight_files(directory))


def evict(directory: Path) -> None:
    """Drop the weight files from the page cache. Raises RuntimeError if a page remains."""
    for _ in range(5):  # the kernel retains a few pages now and then
        for path in weight_files(directory):
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(map(_resident_pages, weight_files(directory))):
            return
    raise RuntimeError(f"weights of {directory} remain in the page cache: another process has mapped them")


def _resident_pages(path: Path) -> int:
    """Return the number of pages of a file that are in memory. Raises OSError."""
    length = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as view:
        vector = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(view)
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), vector)
        del anchor
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return sum(page & 1 for page in bytes(vector))


def _write(target: Path, config: Mapping[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    torch.set_default_dtype(getattr(torch, config["torch_dtype"]))
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(target, max_shard_size="512MB")
    (target / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    _write(Path(sys.argv[1]), json.loads(sys.argv[2]))
