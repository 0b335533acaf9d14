"""Tiny models with real architectures and seeded random weights, built locally so that demos and tests do not need the hub.

Invariant: a name and ``GENERATION`` determine every byte. The unembedding weights are large enough (logit deviation of a
few units) to keep the two most likely tokens far apart. Greedy output is therefore stable when the order of summation
changes, and token comparisons rely on that.
"""

import errno
import math
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.artifacts.errors import NoSpaceError
from coldstart.contract.environment import SUPERVISOR_PID
from coldstart.errors import ColdstartError, UsageError
from coldstart.models import aliases
from coldstart.system.dry_run import find_directory
from coldstart.system.proc.lifeline import die_with_supervisor

GENERATION = 1
NAMES = aliases.TINY

# Prefix of the directories of unfinished builds.
DRAFT = ".draft-"
_SEED = 20240607
_VOCAB = 2048
_HIDDEN = 256
_LAYERS = 8
_HEADS = 4
_POSITIONS = 2048
_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tiny_model(name: str, models: Path) -> Path:
    """Return the directory of the tiny model ``name`` below ``models``. Build the model on first use.

    Concurrent calls are safe: one process builds under a lock and publishes the model with a rename. A dry run builds in
    a temporary directory.

    Raises:
        UsageError: The name is unknown.
        ColdstartError: torch or transformers is missing.
    """
    if name not in NAMES:
        raise UsageError(f"unknown tiny model {name!r}: expected one of {', '.join(NAMES)}")
    final = models / f"tiny-v{GENERATION}" / name
    if final.is_dir():
        return final
    if (temporary := find_directory()) is not None:
        final = temporary / final.relative_to(models)
    final.parent.mkdir(parents=True, exist_ok=True)
    with files.hold_lock(final.with_name(f".{name}.lock")):
        if not final.is_dir():
            with files.create_owned_directory(final.parent, DRAFT) as own:
                draft = own / name
                draft.mkdir()
                _run_child(name, draft)
                draft.rename(final)
    return final


def _run_child(name: str, draft: Path) -> None:
    # Use a child process, so that the caller does not import torch.
    command = [sys.executable, "-P", "-m", "coldstart.models.tiny", name, str(draft)]
    # Pass the path, so that a caller that is only on the path and not installed builds the same model.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    env[str(SUPERVISOR_PID)] = str(os.getpid())
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        if os.strerror(errno.ENOSPC) in reason:
            raise NoSpaceError(f"no space left while building {name} in {draft.parents[1]}")
        raise ColdstartError(f"cannot build {name}: {reason}", hint="run `coldstart install cpu`")


def make_tokenizer() -> Any:
    """Train a deterministic byte-level BPE tokenizer with 2,048 tokens on invented words, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = list(_SPECIALS.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    # Made-up words from a few syllables have enough structure for byte-pair merges, and are free of copyright.
    rng = random.Random(_SEED)
    syllables = [c + v + e for c in "bdfgklmnprstv" for v in "aeiou" for e in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(1500)]
    sentences = (
        " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + rng.choice(".?!")
        for _ in range(4000)
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", specials.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=_POSITIONS,
        chat_template=_CHAT_TEMPLATE,
        **_SPECIALS,
    )


def _make_config(name: str) -> Any:
    from transformers import LlamaConfig, OPTConfig, Qwen2Config

    common: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": _POSITIONS,
        # With tied weights, every token would most likely be followed by itself.
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 3,
        "dtype": "float32",
    }
    if name == "tiny-opt":
        return OPTConfig(ffn_dim=4 * _HIDDEN, word_embed_proj_dim=_HIDDEN, dropout=0.0, **common)
    kind = LlamaConfig if name == "tiny-llama" else Qwen2Config
    return kind(intermediate_size=704, num_key_value_heads=2, **common)


def init_seeded_weights(model: Any) -> None:
    """Initialize a transformers model with weights that are seeded by parameter name. Norms keep their values."""
    import torch

    head = model.get_output_embeddings()
    for name, weight in sorted(model.named_parameters()):
        if "norm" in name:
            continue  # norms keep their ones and zeros
        generator = torch.Generator().manual_seed(_SEED ^ zlib.crc32(name.encode()))
        # Scaled by fan-in, wider where it determines the distance of logits.
        wide = 3.0 if head is not None and weight is head.weight else 1.0
        deviation = 0.1 if weight.dim() < 2 else wide / math.sqrt(weight.shape[-1])
        if "embed" in name and weight.dim() > 1 and wide == 1.0:
            deviation = 1.0
        with torch.no_grad():
            weight.normal_(0.0, deviation, generator=generator)
    if head is not None:
        with torch.no_grad():
            # Special tokens score zero, far below the best other token, so a greedy run never stops early.
            head.weight[: len(_SPECIALS)] = 0.0


def _write(name: str, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_make_config(name))
    init_seeded_weights(model)
    model.save_pretrained(target)
    make_tokenizer().save_pretrained(target)


if __name__ == "__main__":
    die_with_supervisor()
    _write(sys.argv[1], Path(sys.argv[2]))
