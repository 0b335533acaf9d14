"""Warm templates of a host with fake servers: start, memory accounting, and stop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import TWO, Stage, run, staged, wait_until

from coldstart.host import configuration
from coldstart.host.live import lifecycle, templates
from coldstart.host.live.profiles import Meter
from coldstart.host.live.servers import Ready

ENGINE = {**TWO["a"], "engine_template": True}


def _kept(stage: Stage) -> int:
    said: Any = stage.driver.status()
    return int(said["host"]["runtime_template_bytes"])


def _error(stage: Stage) -> str:
    said: Any = stage.driver.status()
    return str(said["host"]["runtime_template_error"])


class Fixed(Meter):
    """Meter with 3 bytes per template and 6 per server; `asked` counts measurements of templates, `trees` of servers."""

    def __init__(self) -> None:
        super().__init__(on_cpu=True)
        self.asked = self.trees = 0

    def tree(self, pid: int) -> int:
        self.trees += 1
        return 6

    def alone(self, pid: int) -> int:
        self.asked += 1
        return 3


def test_the_first_start_waits_for_the_runtime_template_and_its_memory_is_booked(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, hold=True, memory=20) as stage:
            (template,) = stage.servers.templates
            assert (template.level, _kept(stage)) == ("runtime", 4)
            asked = asyncio.create_task(stage.ask(model="a", prompt=1))
            await wait_until(lambda: stage.model("a")["state"] == "starting")
            await asyncio.sleep(0.02)
            assert stage.servers.begun == []
            template.gate.set()
            await stage.servers.begins(1)
            stage.servers.hold = False
            stage.servers.last("a").gate.set()
            assert (await asked)[0] == 200 and _kept(stage) == 4
            last = stage.model("a")["last_start"]
            assert 0 < last["phases"]["wait for the template"] < last["seconds"]
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            assert "wait for the template" not in stage.model("b")["last_start"]["phases"]
        assert template.ended.done()

    run(work())


def test_wait_for_the_template_is_the_first_span_of_a_start() -> None:
    load = {"name": "load", "track": "worker", "start_s": 1.0, "end_s": 3.0}
    document = (
        Ready("fresh", 7, {"phases": {"load": 2.0}, "spans": [load], "attempts": 1}).add_wait(30.0).document
    )
    wait = {"name": "wait for the template", "track": "host", "start_s": 0.0, "end_s": 30.0}
    assert document["spans"] == [wait, {**load, "start_s": 31.0, "end_s": 33.0}]
    assert list(document["phases"].items()) == [("wait for the template", 30.0), ("load", 2.0)]
    assert document["attempts"] == 1


class Shared(Meter):
    """Proportional set sizes of a template of 300 bytes and of servers that add 100 each."""

    def __init__(self) -> None:
        super().__init__(on_cpu=True)
        self.servers = self.trees = 0

    def tree(self, pid: int) -> int:
        self.trees += 1
        return 100 + self.alone(pid)

    def alone(self, pid: int) -> int:
        return 300 // (1 + self.servers)


def test_a_new_server_does_not_make_the_earlier_measurements_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MEASURE_FIRST_S", 0.01)
    meter = Shared()
    models = {name: {"memory": 100, "start_s": 1.0} for name in "ab"}

    async def work() -> None:
        limits = {"runtime_template": True, "template_bytes": 300, "memory": 505}
        async with asyncio.timeout(30), staged(tmp_path, models, **limits, meter=meter) as stage:
            stage.servers.mode = "template-runtime"
            for meter.servers, name in enumerate("ab", 1):
                await stage.ask(model=name, prompt=1)
                await wait_until(lambda: meter.trees == meter.servers)
            await wait_until(lambda: stage.model("b")["memory_source"] == "observed")
            assert [stage.model(name)["state"] for name in "ab"] == ["ready", "ready"]
            assert [stage.model(name)["held_bytes"] for name in "ab"] == [100, 100]

    run(work())


def _forks(stage: Stage) -> Any:
    return stage.driver.lifecycle.templates.runtime


@pytest.mark.parametrize("when", ["ready", "ready with a server", "starting"])
def test_stopped_template_is_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(templates, "CHECK_S", 0.05)
    monkeypatch.setattr(templates, "STABLE_S", 0.0)
    sleeper = subprocess.Popen(["sleep", "60"])

    async def work() -> None:
        async with staged(
            tmp_path, runtime_template=True, template_bytes=4, memory=20, hold=when == "starting"
        ) as stage:
            first, stage.servers.hold = stage.servers.templates[0], False
            if when != "starting":
                await wait_until(lambda: _forks(stage).pid)
                _forks(stage).pid = sleeper.pid
            if when == "ready with a server":
                assert (await stage.ask(model="a", prompt=1))[0] == 200
            first.stopped = True
            sleeper.send_signal(signal.SIGSTOP)
            await wait_until(lambda: len(stage.servers.templates) == 2)
            # A server that was forked from it must not end with it.
            assert first.retired is (when == "ready with a server") is not first.was_killed
            assert (await stage.ask(model="b", prompt=2))[0] == 200

    run(work())
    sleeper.kill()
    sleeper.wait()


def test_start_waits_for_the_next_template_when_the_first_is_killed(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, hold=True, memory=20) as stage:
            asked = asyncio.create_task(stage.ask(model="a", prompt=1))
            await wait_until(lambda: stage.model("a")["state"] == "starting")
            stage.servers.templates[0].kill()
            await wait_until(lambda: len(stage.servers.templates) == 2)
            await asyncio.sleep(2 * templates.SETTLE_S)
            assert stage.servers.begun == []
            stage.servers.hold = False
            stage.servers.templates[1].gate.set()
            assert (await asked)[0] == 200

    run(work())


def _restorable(*names: str) -> configuration.HostFile:
    """Return a host file with a runtime template and two models; the bundles of `names` have a snapshot."""
    return configuration.parse(
        {"memory": 20, "runtime_template": True, "models": {"a": {}, "b": {}}},
        lambda launch: configuration.Profile(5, 1.0, "bundle", needs_no_template=launch.name in names),
    )


def test_start_from_a_snapshot_does_not_wait_for_the_runtime_template(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hold=True, template_bytes=4) as stage:
            stage.driver.configure(_restorable("a"))
            (template,) = stage.servers.templates
            stage.servers.hold, stage.servers.mode = False, "snapshot"
            assert template.launch.name == "b"
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            assert not template.ready.done()
            asked = asyncio.create_task(stage.ask(model="b", prompt=1))
            await wait_until(lambda: stage.model("b")["state"] == "starting")
            assert len(stage.servers.begun) == 1
            template.gate.set()
            assert (await asked)[0] == 200

    run(work())


def test_reload_stops_and_restarts_the_template(tmp_path: Path) -> None:
    def file(wanted: bool) -> configuration.HostFile:
        return configuration.parse({"memory": 20, "runtime_template": wanted, "models": TWO})

    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
            stage.driver.configure(file(False))
            await wait_until(lambda: not _kept(stage))
            stage.driver.configure(file(True))
            await wait_until(lambda: len(stage.servers.templates) == 2)
            assert [one.retired for one in stage.servers.templates] == [True, False]
            assert _error(stage) == ""

    run(work())


def test_failed_template_delays_no_model_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "AGAIN_S", 0.05)

    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
            stage.servers.templates_fail = True
            stage.servers.templates[0].over.set()
            await wait_until(lambda: len(stage.servers.templates) >= 3)
            # The next start uses the arguments of the next model.
            assert [one.launch.name for one in stage.servers.templates[:3]] == ["a", "b", "a"]
            assert _error(stage) == "no template"
            assert (await stage.ask(model="a", prompt=1))[0] == 200

    run(work())


def test_an_engine_template_is_a_tier_with_its_own_memory(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            await stage.ask(model="a", prompt=1)
            (template,) = stage.servers.templates
            assert template.level == "engine" and stage.model("a")["penalty_s"].keys() == {
                "awake", "template", "stopped"
            }  # fmt: skip
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            found = stage.model("a")
            assert (found["state"], found["tier"], found["held_bytes"]) == ("asleep", "template", 3)
            assert (await stage.ask(model="a", prompt=2))[0] == 200
            # It was forked from the same template, and no memory is counted twice.
            assert stage.servers.templates == [template] and not template.ended.done()
        assert template.ended.done()

    run(work())


def test_an_engine_template_that_dies_leaves_the_model_stopped(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            for name in "ab":
                await stage.ask(model=name, prompt=1)
            stage.servers.templates[0].over.set()
            await wait_until(lambda: stage.model("a")["state"] == "stopped")
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            assert len(stage.servers.templates) == 2

    run(work())


def test_changed_arguments_stop_an_unused_template(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            for name in "ab":
                await stage.ask(model=name, prompt=1)
            models = {"a": {**ENGINE, "args": ["--seed", "1"]}, "b": TWO["b"]}
            stage.driver.configure(
                configuration.parse({"memory": 15, "runtime_template": False, "models": models})
            )
            await wait_until(lambda: stage.model("a")["state"] == "stopped")
            assert stage.servers.templates[0].ended.done()

    run(work())


def test_slow_template_is_a_start_past_its_deadline(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, hold=True, ready_timeout_s=0.05) as stage:
            status, _, body = await stage.ask(model="a", prompt=1)
            assert status == 503 and "not ready within 0.05 s" in body["error"]["message"]
            assert stage.servers.begun == []

    run(work())
