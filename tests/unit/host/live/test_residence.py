"""One server of the host: it sleeps and wakes, and its queue of connections may be full."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fake_upstream import TWO, run, staged, wait_until

SLEEPY = [{"name": "asleep-1", "memory": 2, "penalty_s": 0.1, "host_memory": 8}]


@pytest.mark.parametrize("sleeps", [True, False])
def test_evicted_model_sleeps_when_its_server_can_else_stops(tmp_path: Path, sleeps: bool) -> None:
    models = {"a": {**TWO["a"], "tiers": SLEEPY}, "b": TWO["b"]}

    async def work() -> None:
        async with staged(tmp_path, models, memory=12, host_memory=8) as stage:
            stage.servers.sleeps = sleeps
            await stage.ask(model="a", prompt=1)
            assert (await stage.ask(model="b", prompt=2))[0] == 200
            assert stage.model("a")["tier"] == ("asleep-1" if sleeps else "stopped")
            assert (await stage.ask(model="a", prompt=3))[0] == 200
            assert [one.launch.name for one in stage.servers.begun] == (
                ["a", "b"] if sleeps else ["a", "b", "a"]
            )
            expected = ["/v1/completions", "/sleep?level=1", "/wake_up", "/v1/completions"]
            assert stage.servers.begun[0].paths == (expected if sleeps else expected[:2])
            text = stage.driver.metrics.text().decode()
            # Waking has no stages: those of the start are counted once.
            loads = 2 if sleeps else 3
            assert (
                f'coldstart_start_stage_seconds_count{{mode="fake",stage="read tensors"}} {loads}.0' in text
            )
            assert 'stage="read tensors"' not in "".join(
                line for line in text.splitlines() if "asleep-1" in line
            )

    run(work())


def test_request_is_retried_when_the_connection_queue_is_full(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hold=True) as stage:
            stage.servers.backlog = 2
            asked = [asyncio.create_task(stage.ask(model="a", prompt=number)) for number in range(60)]
            await wait_until(lambda: len(stage.driver._tickets) == 60)
            stage.servers.last("a").gate.set()
            assert {one[0] for one in await asyncio.gather(*asked)} == {200}
            assert sorted(stage.servers.last("a").asked) == list(range(60))

    run(work())
