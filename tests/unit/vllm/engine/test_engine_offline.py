"""The iteration profile is measured within the KV cache, and disturbed measurements do not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.system import runtime
from coldstart.vllm.engine import offline


@pytest.mark.vllm
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_step_ends_with_its_iteration(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """Use vLLM's parser and rule: with one batch in flight the engine has no queue and cannot return early."""
    from vllm.config import VllmConfig

    from coldstart.vllm.engine import server

    monkeypatch.setattr(runtime, "targets_cpu", lambda: on_cpu)
    args, *_ = server.parse_args(
        offline.disable_async_scheduling(Arguments(["--model", "m", "--async-scheduling"]))
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=args.async_scheduling),
        use_v2_model_runner=True,
    )
    assert VllmConfig.max_concurrent_batches.fget(config) == (2 if on_cpu else 1)
