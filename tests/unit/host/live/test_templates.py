"""Warm templates of a host over fake servers: what is waited for, counted, given up, and what ends with what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import TWO, Stage, run, staged, until

from coldstart.host import configuration
from coldstart.host.live import templates
from coldstart.host.live.meter import Meter

ENGINE = {**TWO["a"], "engine_template": True}


def _model(stage: Stage, name: str) -> dict[str, Any]:
    said: Any = stage.driver.status()
    return next(dict(model) for model in said["models"] if model["name"] == name)


def _kept(stage: Stage) -> int:
    said: Any = stage.driver.status()
    return int(said["host"]["runtime_template_bytes"])


class Fixed(Meter):
    """A template holds 3 bytes, a server 6."""

    asked = 0

    def tree(self, pid: int) -> int:
        return 6

    def alone(self, pid: int) -> int:
        return 3


def test_the_first_start_waits_for_the_runtime_template_and_its_memory_is_booked(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, hold=True, memory=20) as stage:
            (template,) = stage.servers.templates
            assert (template.level, _kept(stage)) == ("runtime", 4)
            asked = asyncio.create_task(stage.ask(model="a", prompt=1))
            await until(lambda: _model(stage, "a")["state"] == "starting")
            await asyncio.sleep(0.02)
            assert stage.servers.begun == []
            template.gate.set()
            await stage.servers.begins(1)
            stage.servers.hold = False
            stage.servers.of("a").gate.set()
            assert (await asked)[0] == 200 and _kept(stage) == 4
        assert template.ended.done()

    run(work())


@asynccontextmanager
async def _metered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> AsyncIterator[tuple[Stage, Fixed]]:
    """A stage whose servers come up by that mode, and its meter."""
    monkeypatch.setattr(templates, "MEASURE_FIRST_S", 0.0)
    meter = Fixed()
    async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20, meter=meter) as stage:
        stage.servers.mode = mode
        yield stage, meter


def test_what_it_holds_is_measured_beside_a_server_that_shares_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with _metered(tmp_path, monkeypatch, "template-runtime") as (stage, meter):
            # By itself it holds all that servers share with it: with a server's part on top no model might fit.
            await until(lambda: stage.driver.lifecycle.templates.runtime.pid)
            await asyncio.sleep(0.05)
            assert _kept(stage) == 4 and meter.asked == 0
            await stage.ask(model="a", prompt=1)
            await until(lambda: _kept(stage) == 3)

    run(work())


def test_a_server_that_was_not_forked_from_it_shares_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with _metered(tmp_path, monkeypatch, "fresh") as (stage, meter):
            await stage.ask(model="a", prompt=1)
            await asyncio.sleep(0.05)
            assert _kept(stage) == 4 and meter.asked == 0

    run(work())


def test_one_that_leaves_no_room_for_a_model_is_not_begun(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=6) as stage:
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            await until(lambda: not _kept(stage))
            assert stage.servers.templates == []

    run(work())


def test_it_is_given_up_for_a_model_that_turns_out_larger(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=5) as stage:
            await stage.ask(model="a", prompt=1)
            stage.driver.lifecycle.on_measured("a", 12)
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            (template,) = stage.servers.templates
            assert not template.retired
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            assert template.retired and _kept(stage) == 0

    run(work())


def test_a_reload_gives_it_up_and_takes_it_again(tmp_path: Path) -> None:
    def file(wanted: bool) -> configuration.HostFile:
        return configuration.parse({"memory": 20, "runtime_template": wanted, "models": TWO})

    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
            stage.driver.configure(file(False))
            await until(lambda: not _kept(stage))
            stage.driver.configure(file(True))
            await until(lambda: len(stage.servers.templates) == 2)
            assert [one.retired for one in stage.servers.templates] == [True, False]

    run(work())


def test_one_that_fails_delays_nobody_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "AGAIN_S", 0.05)

    async def work() -> None:
        async with staged(tmp_path, runtime_template=True, template_bytes=4, memory=20) as stage:
            stage.servers.templates_fail = True
            stage.servers.templates[0].over.set()
            await until(lambda: len(stage.servers.templates) >= 3)
            # The next time by the words of the next model.
            assert [one.launch.name for one in stage.servers.templates[:3]] == ["a", "b", "a"]
            assert (await stage.ask(model="a", prompt=1))[0] == 200

    run(work())


def test_an_engine_template_is_a_tier_with_its_own_memory(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            await stage.ask(model="a", prompt=1)
            (template,) = stage.servers.templates
            assert template.level == "engine" and _model(stage, "a")["penalty_s"].keys() == {
                "awake", "template", "stopped"
            }  # fmt: skip
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            found = _model(stage, "a")
            assert (found["state"], found["tier"], found["held_bytes"]) == ("asleep", "template", 3)
            assert (await stage.ask(model="a", prompt=2))[0] == 200
            # It was forked from the same template, and nobody's memory is booked twice.
            assert stage.servers.templates == [template] and not template.ended.done()
        assert template.ended.done()

    run(work())


def test_memory_for_another_ends_the_template_as_well(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": {**TWO["b"], "memory": 15}}, meter=Fixed()) as stage:
            await stage.ask(model="a", prompt=1)
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            assert _model(stage, "a")["tier"] == "stopped" and stage.servers.templates[0].ended.done()

    run(work())


def test_an_engine_template_that_dies_leaves_the_model_stopped(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            for name in "ab":
                await stage.ask(model=name, prompt=1)
            stage.servers.templates[0].over.set()
            await until(lambda: _model(stage, "a")["state"] == "stopped")
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            assert len(stage.servers.templates) == 2

    run(work())


def test_without_an_engine_template_the_model_starts_all_the_same_and_stops(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}) as stage:
            stage.servers.templates_fail = True
            for name in "aba":
                assert (await stage.ask(model=name, prompt=1))[0] == 200

    run(work())


def test_other_words_end_a_template_that_nobody_uses(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, meter=Fixed()) as stage:
            for name in "ab":
                await stage.ask(model=name, prompt=1)
            models = {"a": {**ENGINE, "args": ["--seed", "1"]}, "b": TWO["b"]}
            stage.driver.configure(
                configuration.parse({"memory": 15, "runtime_template": False, "models": models})
            )
            await until(lambda: _model(stage, "a")["state"] == "stopped")
            assert stage.servers.templates[0].ended.done()

    run(work())


def test_a_template_that_is_built_too_long_is_a_start_past_its_deadline(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {"a": ENGINE, "b": TWO["b"]}, hold=True, start_deadline_s=0.05) as stage:
            status, _, body = await stage.ask(model="a", prompt=1)
            assert status == 503 and "not ready within 0.05 s" in body["error"]["message"]
            assert stage.servers.begun == []

    run(work())
