"""What a host starts without a request, with fake servers: its runtime template, and models by schedule."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import TWO, Stage, staged, wait_until

from coldstart.host import configuration
from coldstart.host.live import driver, templates
from coldstart.host.live.driver import PrewarmSchedule
from coldstart.host.live.servers import ReadyServer


def _kept(stage: Stage) -> int:
    said: Any = stage.driver.status()
    return int(said["host"]["runtime_template_bytes"])


def _error(stage: Stage) -> str:
    said: Any = stage.driver.status()
    return str(said["host"]["runtime_template_error"])


async def test_first_start_waits_for_the_runtime_template_and_its_memory_is_booked(tmp_path: Path) -> None:
    async with staged(tmp_path, runtime_template=True, template_bytes=4, hold=True, memory=20) as stage:
        (template,) = stage.servers.templates
        assert (template.level, _kept(stage)) == ("runtime", 4)
        asked = asyncio.create_task(stage.ask(model="a", prompt=1))
        await wait_until(lambda: stage.model("a")["state"] == "starting")
        await asyncio.sleep(0.2)
        assert stage.servers.begun == []
        template.gate.set()
        await stage.servers.begins(1)
        stage.servers.hold = False
        stage.servers.last("a").gate.set()
        assert (await asked)[0] == 200 and _kept(stage) == 4
        last = stage.model("a")["last_start"]
        assert 0 < last["phases"]["wait for the template"] < last["seconds"]
        assert (await stage.ask(model="b", prompt=1))[0] == 200
        later = stage.model("b")["last_start"]["phases"].get("wait for the template", 0.0)
        assert later < last["phases"]["wait for the template"] / 2
    assert template.ended.done()


def test_wait_for_the_template_is_the_first_span_of_a_start() -> None:
    load = {"name": "load", "track": "worker", "start_s": 1.0, "end_s": 3.0}
    document = (
        ReadyServer("fresh", 7, {"phases": {"load": 2.0}, "spans": [load], "attempts": 1})
        .add_template_wait(30.0)
        .document
    )
    wait = {"name": "wait for the template", "track": "host", "start_s": 0.0, "end_s": 30.0}
    assert document["spans"] == [wait, {**load, "start_s": 31.0, "end_s": 33.0}]
    assert list(document["phases"].items()) == [("wait for the template", 30.0), ("load", 2.0)]
    assert document["attempts"] == 1


async def test_reload_stops_and_restarts_the_template(tmp_path: Path) -> None:
    def file(wanted: bool) -> configuration.HostFile:
        return configuration.parse({"memory": 20, "runtime_template": wanted, "models": TWO})

    async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
        stage.driver.configure(file(False))
        await wait_until(lambda: not _kept(stage))
        stage.driver.configure(file(True))
        await wait_until(lambda: len(stage.servers.templates) == 2)
        assert [one.retired for one in stage.servers.templates] == [True, False]
        assert _error(stage) == ""


async def test_failed_template_is_retried_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "AGAIN_S", 0.05)
    async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
        stage.servers.templates_fail = True
        stage.servers.templates[0].over.set()
        await wait_until(lambda: len(stage.servers.templates) >= 3)
        # The next start uses the arguments of the next model.
        assert [one.launch.name for one in stage.servers.templates[:3]] == ["a", "b", "a"]
        assert _error(stage) == "no template"
        assert (await stage.ask(model="a", prompt=1))[0] == 200


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_lost_template_is_replaced_at_once_unless_many_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
        for number, template in enumerate(stage.servers.templates, 1):
            await wait_until(template.ready.done)
            getattr(template, end)()
            if number > templates.ENDS:
                break
            await wait_until(lambda: stage.servers.templates[-1] is not template)  # noqa: B023
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            assert _error(stage) == ""
        monkeypatch.setattr(templates, "AGAIN_S", 0.05)
        await wait_until(lambda: _error(stage) == "stopped")
        await wait_until(lambda: len(stage.servers.templates) == templates.ENDS + 2 and not _error(stage))


async def test_start_waits_for_the_replacement_of_a_template_whose_exit_is_not_reported_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
        await wait_until(stage.servers.templates[0].ready.done)
        stage.servers.hold = True
        monkeypatch.setattr(templates.processes, "read_identity", lambda pid: None)
        asked = asyncio.create_task(stage.ask(model="a", prompt=1))
        await wait_until(lambda: stage.model("a")["state"] == "starting")
        stage.servers.templates[0].kill()
        await wait_until(lambda: len(stage.servers.templates) == 2)
        assert stage.servers.begun == []
        stage.servers.templates[1].gate.set()
        await stage.servers.begins(1)
        stage.servers.last("a").gate.set()
        assert (await asked)[0] == 200


async def test_slow_template_is_a_start_past_its_deadline(tmp_path: Path) -> None:
    limits = {"runtime_template": True, "template_bytes": 4, "memory": 20, "ready_timeout_s": 0.05}
    async with staged(tmp_path, hold=True, **limits) as stage:
        status, _, body = await stage.ask(model="a", prompt=1)
        assert status == 503 and "not ready within 0.05 s" in body["error"]["message"]
        assert stage.servers.begun == []


async def test_no_memory_is_reserved_for_a_template_that_no_model_uses(tmp_path: Path) -> None:
    models = {"a": {**TWO["a"], "mode": "fresh"}}
    async with staged(tmp_path, models, runtime_template=True, template_bytes=4) as stage:
        assert (stage.servers.templates, _kept(stage)) == ([], 0)


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
        self.schedule.start_due_models()
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
        stage.driver.schedule.start_due_models()
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
        stage.driver.schedule.start_due_models()
        assert not stage.servers.begun
        stage.driver._prewarm("a")
        await wait_until(lambda: stage.model("a")["state"] == "failed")
        assert 'coldstart_host_prewarms_missed_total{model="a"} 2' in (await stage.get("/metrics"))[1]
