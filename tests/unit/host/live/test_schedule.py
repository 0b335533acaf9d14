"""Prewarming by schedule: moments of a clock that a test sets, and a host that starts its model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.fake_upstream import TWO, staged, wait_until

from coldstart.host.live import driver
from coldstart.host.live.driver import PrewarmSchedule

HOURLY, DAILY = "0 * * * *", "0 0 * * *"


class Clock:
    """Schedule of models at a time that the test sets; `said` lists what it orders."""

    def __init__(self, **crontabs: str) -> None:
        self.now, self.said = 1_800_000_000.0, list[str]()
        self.schedule = PrewarmSchedule(
            lambda model: self.said.append(f"prewarm {model}"),
            lambda model, reason: self.said.append(f"missed {model}: {reason}"),
            lambda: self.now,
        )
        self.schedule.configure(crontabs)

    def tick(self, now: float) -> list[str]:
        """Check the schedule at a time; return what it orders then."""
        self.now, self.said[:] = now, []
        self.schedule.check()
        return list(self.said)


async def test_clock_that_is_set_back_does_not_delay_the_next_moment() -> None:
    clock = Clock(a=HOURLY)
    hour = clock.now - clock.now % 3600 + 3600
    assert clock.tick(hour - 86400 - 10) == [] and clock.tick(hour - 86400) == ["prewarm a"]
    clock.schedule.configure({})


async def test_configuration_retains_the_moments_of_unchanged_models() -> None:
    clock = Clock(a=HOURLY, b=HOURLY)
    hour = clock.now - clock.now % 3600 + 3600
    clock.now = hour + 1
    clock.said.clear()
    clock.schedule.configure({"a": HOURLY, "c": HOURLY})
    assert clock.said == ["prewarm a"] and clock.tick(hour + 3600) == ["prewarm a", "prewarm c"]
    clock.schedule.configure({})
    assert clock.tick(hour + 9e6) == []


async def test_schedule_wakes_up_by_itself(tmp_path: Path) -> None:
    models = {**TWO, "a": {**TWO["a"], "prewarm": DAILY}}
    async with staged(tmp_path, models) as stage:
        moment = next(iter(stage.driver.schedule._next.values()))
        stage.driver.schedule._now = lambda: moment
        assert not stage.servers.begun
        stage.driver.schedule.check()
        await wait_until(lambda: stage.model("a")["state"] == "ready")
        assert stage.model("a")["requests"] == 0

        made: list[str] = []
        loop = asyncio.get_running_loop()
        begun = loop.time()
        soon = PrewarmSchedule(made.append, lambda *_: None, lambda: moment - 0.05 + loop.time() - begun)
        soon.configure({"a": DAILY})
        assert not made
        await wait_until(lambda: made)
        soon.configure({})


async def test_missed_prewarming_is_counted(tmp_path: Path) -> None:
    models = {**TWO, "a": {**TWO["a"], "prewarm": DAILY}}
    async with staged(tmp_path, models) as stage:
        stage.servers.failing["a"] = "no weights"
        moment = next(iter(stage.driver.schedule._next.values()))
        stage.driver.schedule._now = lambda: moment + driver.LATE_S
        stage.driver.schedule.check()
        assert not stage.servers.begun
        stage.driver._prewarm("a")
        await wait_until(lambda: stage.model("a")["state"] == "failed")
        async with stage.client.get(stage.url + "/metrics") as answer:
            assert 'coldstart_host_prewarms_missed_total{model="a"} 2' in await answer.text()
