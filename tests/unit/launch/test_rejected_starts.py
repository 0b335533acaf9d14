"""Errors of vLLM that every start with the same arguments meets are found in its log, and end a start at once."""

from __future__ import annotations

import pytest

from coldstart.vllm.engine import rejection

# Texts of vLLM 0.32.0.
TOO_LONG = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len \
(max_position_embeddings=2048.0 or model_max_length=None in model's config.json). To allow overriding this maximum, set \
the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. [type=value_error, input_value=ArgsKwargs((), {'model': '/m'}), input_type=A]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""
SCARCE = """(EngineCore pid=7) ERROR 11-26 13:20:49 [core.py:1510] ValueError: Available memory on node 0 (15.2/20.21 GiB) \
on startup is less than desired CPU memory utilization (0.99, 20.01 GiB). On the CPU backend, the \
`--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name).
RuntimeError: Engine core initialization failed. See root cause above.
"""
SMALL_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (1024), (0.5 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (0.1 GiB). Try increasing `gpu_memory_utilization`"
)
ARCHITECTURE = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architecture MptForCausalLM was supported in vLLM until v0.28.0, and is not supported anymore. Please \
use an older version of vLLM if you want to use this model architecture. [type=value_error, input_type=ArgsKwargs]
"""
USAGE = "usage: api_server.py [-h]\napi_server.py: error: argument --max-model-len: invalid value: 'x'\n"


@pytest.mark.parametrize(
    ("text", "message", "hint", "code"),
    [
        (
            TOO_LONG,
            "vLLM rejects its arguments: User-specified max_model_len (4096) is greater than the derived max_model_len"
            " (max_position_embeddings=2048.0 or model_max_length=None in model's config.json).",
            "change the vLLM arguments",
            2,
        ),
        (
            ARCHITECTURE,
            "vLLM cannot run this model: Model architecture MptForCausalLM was supported in vLLM until v0.28.0, and is not"
            " supported anymore.",
            "use a model that this version of vLLM supports",
            1,
        ),
        (
            SCARCE,
            "vLLM has too little memory for its arguments: Available memory on node 0 (15.2/20.21 GiB) on startup is less"
            " than desired CPU memory utilization (0.99, 20.01 GiB).",
            "--kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization",
            1,
        ),
        (
            SCARCE.replace("Available memory on node 0", "Free memory on device cuda:0").replace(
                "CPU mem", "GPU mem"
            ),
            "Free memory on device cuda:0 (15.2/20.21 GiB) on startup is less than desired GPU memory utilization",
            "--kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization",
            1,
        ),
        (SMALL_CACHE, "the available KV cache memory (0.1 GiB).", "a smaller --max-model-len", 1),
        (
            USAGE,
            "vLLM rejects its arguments: argument --max-model-len: invalid value: 'x'",
            "vllm serve --help=all",
            2,
        ),
    ],
)
def test_rejection_is_one_line_with_a_hint(text: str, message: str, hint: str, code: int) -> None:
    # A server reports its error in one line.
    for form in (text, " ".join(text.split())) if text != USAGE else (text,):
        found = rejection.find_known_failure(form)
        assert found is not None
        assert message in found.message and hint in found.hint and found.exit_code == code
        assert "\n" not in found.message


@pytest.mark.parametrize(
    "text", ["", "ValueError: no space", "INFO: Available memory on node 0", "1 validation error"]
)
def test_other_errors_are_no_rejection(text: str) -> None:
    assert rejection.find_known_failure(text) is None
