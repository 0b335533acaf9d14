"""The iteration profile is measured within the KV cache, and disturbed measurements do not count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.system import runtime
from coldstart.vllm.engine import offline

NOISE_S = 1.0


class FakeEngine:
    """Fake engine: 1 ms per prompt token, 10 ms per decoding request, and disturbed iterations in every 150."""

    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        self.config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=256),
            model_config=SimpleNamespace(max_model_len=4096),
            cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=block_tokens),
        )
        self.core = SimpleNamespace(available_gpu_memory_for_kv_cache=0)
        self.waiting: list[int] = []
        self.running = self.most = 0
        self.noise: Iterator[float] = cycle([NOISE_S] * 50 + [0.0] * 100)

    def prompt(self, length: int) -> list[int]:
        return [0] * length

    def add(self, prompt: list[int], tokens: int) -> None:
        self.waiting.append(len(prompt))

    def step_seconds(self) -> float:
        seconds = 0.001 * sum(self.waiting) + 0.01 * self.running
        self.running += len(self.waiting)
        self.most = max(self.most, self.running)
        self.waiting = []
        return seconds + next(self.noise)

    def drain(self) -> list[Any]:
        self.running = 0
        return []


def test_profile_stays_within_the_kv_cache() -> None:
    engine = FakeEngine(blocks=25, block_tokens=16)
    found = offline.iteration_profile(engine)  # type: ignore[arg-type]
    assert [size for size, _ in found["decode"]] == [1, 2, 4, 8, 16, 24] and engine.most == 24
    assert [size for size, _ in found["prefill"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 382]


def test_profile_excludes_a_disturbance_of_any_length() -> None:
    found = offline.iteration_profile(FakeEngine(blocks=10_000))  # type: ignore[arg-type]
    assert found["decode"] == [[size, pytest.approx(0.01 * size)] for size in (1, 2, 4, 8, 16, 32, 64)]
    assert found["prefill"] == [[1 << power, pytest.approx(0.001 * (1 << power))] for power in range(12)]


def test_profile_measures_with_a_minimal_kv_cache() -> None:
    found = offline.iteration_profile(FakeEngine(blocks=2))  # type: ignore[arg-type]
    assert [size for size, _ in found["decode"]] == [1]


@pytest.mark.vllm
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_step_ends_with_its_iteration(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """Use vLLM's parser and rule: with one batch in flight the engine has no queue and cannot return early."""
    from vllm.config import VllmConfig

    from coldstart.vllm.engine import server

    monkeypatch.setattr(runtime, "targets_cpu", lambda: on_cpu)
    args, *_ = server.parse_args(offline.synchronous(Arguments(["--model", "m", "--async-scheduling"])))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=args.async_scheduling),
        use_v2_model_runner=True,
    )
    assert VllmConfig.max_concurrent_batches.fget(config) == (2 if on_cpu else 1)
