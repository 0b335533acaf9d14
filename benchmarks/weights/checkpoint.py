"""The checkpoint that the weight benchmarks load, and the state of the page cache under it.

Invariant: `GENERATION` determines every byte. The shape is llama's with 1.1 billion parameters in bfloat16
(2.05 GiB), random, in shards of at most 512 MiB in the order of the layers, with an index as the hub has it.
Cold means that mincore(2) finds no page of a file in memory, warm that it finds all of them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from coldstart.models import tiny
from coldstart.models.resolution import weight_files
from coldstart.system import paths

GENERATION = 1
SHARD = 512 << 20
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
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def home() -> Path:
    """Return the directory of these benchmarks below the cache; removing it frees the space."""
    return paths.Cache.at().root / "weights-benchmark"


def built(config: Mapping[str, Any] = CONFIG) -> Path:
    """The directory of the checkpoint of `config`, made on first use (about 20 s for the default)."""
    tag = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    final = home() / f"llama-v{GENERATION}-{tag:08x}"
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=final.parent))
        _tokenizer(draft)
        (draft / "config.json").write_text(json.dumps(config, indent=1))
        # A child: torch stays out of processes that are about to be measured.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.weights.checkpoint", str(draft)], cwd=ROOT, check=True
        )
        draft.rename(final)
    return final


def size(directory: Path) -> int:
    """Bytes of all weight files."""
    return sum(file.stat().st_size for file in weight_files(directory))


def resident(directory: Path) -> float:
    """The share of the weight files' pages that is in the page cache. Raises OSError."""
    pages = [_resident(file) for file in weight_files(directory)]
    return sum(here for here, _ in pages) / sum(count for _, count in pages)


def evict(directory: Path) -> None:
    """Drop the weight files from the page cache. Raises RuntimeError when a page stays."""
    _drain_sockets()
    _until(directory, _drop, lambda share: share == 0, "somebody has them mapped")


def warm(directory: Path) -> None:
    """Read the weight files into the page cache. Raises RuntimeError when a page does not stay."""
    _until(directory, _read, lambda share: share == 1, "too little memory")


def _until(directory: Path, work: Callable[[Path], None], done: Callable[[float], bool], why: str) -> None:
    for _ in range(5):  # the kernel keeps back, or drops, a few pages now and then
        for file in weight_files(directory):
            work(file)
        if done(share := resident(directory)):
            return
    raise RuntimeError(f"{share:.2%} of the weights are in the page cache: {why}")


def _drain_sockets() -> None:
    """Have each processor free the buffers of closed connections: they pin pages that sendfile(2) sent."""
    usable = os.sched_getaffinity(0)
    for processor in usable:
        os.sched_setaffinity(0, {processor})
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            with near, far:
                for _ in range(100):
                    near.sendall(bytes(1000))
                    far.recv(2000)
    os.sched_setaffinity(0, usable)


def _drop(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def _resident(path: Path) -> tuple[int, int]:
    """(pages in memory, pages) of a file."""
    length = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as view:
        count = -(-length // _PAGE)
        vector = (ctypes.c_ubyte * count)()
        anchor = ctypes.c_char.from_buffer(view)
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), vector)
        del anchor
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return bytes(vector).translate(bytes(value & 1 for value in range(256))).count(1), count


def _tokenizer(target: Path) -> None:
    for file in tiny.build("tiny-llama", paths.Cache.at().models).glob("*token*"):
        shutil.copy(file, target)


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor of a llama checkpoint, in the order of the layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _write(target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    dtype = getattr(torch, config["torch_dtype"])
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes(config):
        size = dtype.itemsize * torch.Size(shape).numel()
        held += size
        if held > SHARD and shards[-1]:
            shards.append({})
            held = size
        shards[-1][name] = shape
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {name: _tensor(name, shape, dtype) for name, shape in shard.items()},
            target / file,
            {"format": "pt"},
        )
        index |= dict.fromkeys(shard, file)
    document = {"metadata": {}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))


def _tensor(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(SEED ^ zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0, shape[-1] ** -0.5, generator=generator).to(dtype)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
