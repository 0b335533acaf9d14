"""Tiny random models of architectures that vLLM serves differently, built on first use from transformers' configurations.

Seeds, tokenizer and the spread of the logits are those of coldstart.models.tiny. A separate process builds a model, since this
imports torch and transformers:

    python -m support.architectures NAME DIRECTORY      (with tests/ on the path)
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
_VOCABULARY, _HIDDEN, _LAYERS, _HEADS, _POSITIONS = 2048, 128, 2, 2, 512
_DEEP = {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "hidden_size": _HIDDEN}
_WIDE = _DEEP | {"intermediate_size": 256, "max_position_embeddings": _POSITIONS}
# Configuration class of transformers, its arguments, and the class of its model.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "gpt-neox": ("GPTNeoXConfig", _WIDE, "AutoModelForCausalLM"),
    "bert": ("BertConfig", _WIDE, "AutoModel"),
}


def build(name: str, models: Path) -> Path:
    """Return the directory of one model below `models`, built on first use.

    Raises:
        RuntimeError: The model cannot be built; the message has the output of the builder.
    """
    target = models / name
    if not (target / "config.json").exists():
        path = os.pathsep.join([str(TESTS), *sys.path])
        command = [sys.executable, "-P", "-m", "support.architectures", name, str(target)]
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} cannot be built: {done.stderr[-2000:]}")
    return target


def _write(name: str, target: Path) -> None:
    import torch
    import transformers

    from coldstart.models import tiny

    config_class, arguments, model_class = ARCHITECTURES[name]
    common = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    # Tied weights would make every token most likely to follow itself.
    common |= {"tie_word_embeddings": False, "dtype": "float32"}
    config = getattr(transformers, config_class)(**{**common, **arguments})
    model = getattr(transformers, model_class).from_config(config)
    torch.manual_seed(0)
    tiny.init_seeded_weights(model)
    model.save_pretrained(target)
    tiny.make_tokenizer().save_pretrained(target)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
