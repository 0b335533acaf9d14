"""A worker is adopted only if all flags and variables that it could have read are equal to those of the start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import server_process, template_environment, template_pool

VARIABLES = (
    "VLLM_USE_AOT_COMPILE", "TORCHINDUCTOR_MAX_AUTOTUNE", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "KMP_AFFINITY",
    "LD_PRELOAD", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTHONHASHSEED",
    "CXX",
    "VLLM_CPU_KVCACHE_SPACE", "TORCH_A_VARIABLE_OF_NEXT_YEAR",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_difference_names_variable_that_a_worker_could_read(name: str) -> None:
    reason = template_environment.find_difference({}, {name: "1"}, "template")
    assert reason == f"{name}: the template was created with none, this start has '1'"
    assert template_environment.find_difference({name: "1"}, {name: "2"}, "template") is not None
    assert (
        template_environment.find_difference(
            {name: "1"}, {name: "1", "HOME": "/x", "HF_TOKEN": "abcdefghi"}, "template"
        )
        is None
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--logprobs-mode", "raw_logits"], "logprobs_mode"),
        (["--gdn-prefill-backend", "triton"], "gdn_prefill_backend"),
        (["--additional-config", '{"of": "a plug-in"}'], "additional_config"),
        (["--jit-monitor-mode", "error"], "jit_monitor_mode"),
        (["--num-gpu-blocks-override", "9"], "num_gpu_blocks_override"),
        (["-cc.mode=0"], "compilation_config"),
        (["--max-num-seqs", "9"], "max_num_seqs: the prebuilt worker has 8, this start needs 9"),
        # The scheduler enforces a smaller limit.
        (["--max-num-seqs", "7"], None),
        # Flags that a worker does not receive or does not use.
        (["--additional-config", '{"coldstart_scheduler": {}}'], None),
        (["--scheduling-policy", "priority", "--served-model-name", "x", "--api-key", "k"], None),
    ],
)
def test_difference_names_flag_that_a_worker_may_read(
    words: list[str], named: str | None, home: Path
) -> None:
    """Over vLLM's own parser."""
    from coldstart.vllm.engine import adoption, server

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    place = home / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    given = ["--model", str(place), "--skip-tokenizer-init", "--max-num-seqs", "8"]

    def described(*more: str, key: str = "k") -> dict[str, str]:
        return adoption.describe_worker(server.parse_args([*given, *more])[0], LaunchPlan([], key=key))

    reason = adoption.find_difference(described(), described(*words))
    assert (reason or "None").startswith(str(named))
    assert "the bundle's key" in str(adoption.find_difference(described(), described(key="other")))


def test_forked_server_reports_reason_when_the_worker_does_not_fit(
    home: Path, fake_engine: Callable[[str], None]
) -> None:
    fake_engine("serves")
    warm = template_pool.start("engine", LaunchPlan(["serves"], key="sha256:" + "a" * 64), "tiny", 20)
    try:
        process, reader = server_process.fork_server(LaunchPlan(["unfit"]), warm.socket)
        with pytest.raises(server_process.ServerExitedError, match="does not fit this start: a leaf differs"):
            server_process.await_readiness(process, reader, time.monotonic(), 20)
    finally:
        template_pool.stop(warm, force=True)
