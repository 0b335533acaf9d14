"""The last, partial block of an evicted request is loaded from the host, on vLLM's real schedulers and connector."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from coldstart.lab.engine import EngineSimulator
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.vllm.scheduling import WHOLE_CONNECTOR, arguments, virtual_engine
from coldstart.vllm.scheduling.tails import Tails, keepable
from coldstart.vllm.scheduling.virtual_engine import EngineResources
from tests.support.scheduling.engine_double import EngineDouble, Shape, build, expected, make_request

PROFILE = IterationProfile.create([(1, 0.004), (512, 0.8)], [(1, 0.004), (16, 0.008)])
MACHINE = EngineResources(
    device_blocks=40, block_bytes=1, link_bytes_s=2e9, host_blocks=4000, token_budget=128
)
TRACE = [TraceRequest(0.01 * number, 8 + number % 17, 30 + 7 * (number % 13)) for number in range(60)]


@pytest.mark.parametrize(
    "settings",
    [
        SchedulerSettings("fcfs", batch=16, strategy="proactive"),
        SchedulerSettings(batch=16, alpha_s=0.3),
    ],
    ids=lambda settings: str(settings.policy),
)
def test_tails_reduce_recomputed_tokens(settings: SchedulerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def recomputed() -> float:
        """Return the number of tokens computed again for each eviction."""
        simulator = EngineSimulator(PROFILE, settings, MACHINE)
        simulator.run(TRACE)
        counts = simulator.engine.counts
        return counts.recomputed_tokens / counts.evictions

    with_tails = recomputed()
    monkeypatch.setattr(arguments, "TAILS_CONNECTOR", WHOLE_CONNECTOR)
    monkeypatch.setattr(arguments, "TAILS_MODULE", None)
    virtual_engine._base_config.cache_clear()
    # The schedules differ, and so does the number of evictions.
    assert with_tails * 1.5 < recomputed()
    virtual_engine._base_config.cache_clear()


def crowded(*, depth: int, host_blocks: int = 400) -> EngineDouble:
    """Run vLLM's scheduler with more requests than its blocks can hold."""
    shape = Shape(batch=8, blocks=24, host_blocks=host_blocks, depth=depth)
    engine = EngineDouble(build(shape, AsyncScheduler), shape, seed=3)
    prompts = [[number * 13 + place for place in range(5 + number)] for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(str(number), prompt, 30))
    for _ in range(2000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
    assert engine.outputs == {str(n): expected(prompt, 30) for n, prompt in enumerate(prompts)}
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_blocks", [2, 12, 400])
def test_every_step_reads_the_prefix_that_it_needs(depth: int, host_blocks: int) -> None:
    engine = crowded(depth=depth, host_blocks=host_blocks)
    assert engine.symbolic.stored


def test_tails_are_released_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = Tails.release

    def release(self: Tails, request: object) -> None:
        taken.extend([request.request_id] * (request.request_id in self._kept))  # type: ignore[attr-defined]
        real(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(Tails, "release", release)
    engine = crowded(depth=2)
    assert taken
    tails = engine.scheduler.connector.tails
    engine.add(make_request("last", [1, 2], 1))
    while engine.scheduler.has_requests():
        engine.step()
    engine.step()
    assert not tails._kept and not tails._computed and not tails._leaving


def test_a_tail_that_leaves_after_the_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tails.store

    def late(self: Tails, meta: SimpleNamespace) -> None:
        before = set(meta.jobs_to_flush)
        real(self, meta)  # type: ignore[arg-type]
        meta.jobs_to_flush &= before

    monkeypatch.setattr(Tails, "store", late)
    with pytest.raises(AssertionError, match="read a wrong KV cell"):
        for depth in (1, 2):
            crowded(depth=depth)


def test_keepable_is_false_when_tokens_may_be_taken_back() -> None:
    def group(window: int | None, block: int = 16) -> SimpleNamespace:
        return SimpleNamespace(tokens_per_block=block, sliding_window_size_in_chunks=window)

    def keeps(*groups: SimpleNamespace, chunk: int = 1, draft: object = None, events: bool = False) -> bool:
        kv_events = SimpleNamespace(enable_kv_cache_events=True) if events else None
        config = SimpleNamespace(blocks_per_chunk=chunk, dcp_world_size=1, kv_group_configs=groups)
        return keepable(SimpleNamespace(speculative_config=draft, kv_events_config=kv_events), config)

    assert keeps(group(None)) and keeps(group(None), group(None))
    assert not keeps(group(4)) and not keeps(group(None), group(None, 32))
    assert not keeps(group(None), chunk=2)
    assert not keeps(group(None), draft=1) and not keeps(group(None), events=True)
