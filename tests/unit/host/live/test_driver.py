"""The live host over fake servers: what becomes of models, one by one, while requests come."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_model import generated
from support.fake_upstream import TWO, Stage, run, staged, until

from coldstart.errors import UsageError
from coldstart.host import configuration


def _parsed(models: Any = None, **limits: Any) -> configuration.HostFile:
    own = {"memory": 15, "policy": "lru", "backoff_s": 0.05, "runtime_template": False}
    table = {**own, **limits, "models": models or TWO}
    return configuration.parse(table)


def _model(stage: Stage, name: str) -> dict[str, Any]:
    said: Any = stage.driver.status()
    return next(dict(model) for model in said["models"] if model["name"] == name)


def test_a_model_makes_room_for_another_and_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            for name in "abab":
                assert (await stage.ask(model=name, prompt=name))[2]["model"] == name
            assert [server.launch.name for server in stage.servers.begun] == list("abab")
            assert [one["tier"] for one in (_model(stage, "a"), _model(stage, "b"))] == ["stopped", "awake"]
            said: Any = stage.driver.status()
            assert (said["starts"]["total"], said["starts"]["departures"]) == (4, 3)
            assert [one["mode"] for one in said["recent_starts"]] == ["fake"] * 4
            assert _model(stage, "b")["last_start"]["phases"] == {"load": 0.5}

    run(work())


def test_a_model_in_use_is_not_sent_away(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            long = asyncio.create_task(stage.events(model="a", prompt="x", pieces=30, pause_s=0.01))
            await until(lambda: _model(stage, "a")["in_flight"] == 1)
            other = asyncio.create_task(stage.ask(model="b", prompt="y"))
            assert len(await long) == 31
            assert (await other)[0] == 200

    run(work())


def test_a_model_that_cannot_start_says_why_backs_off_and_disturbs_no_other(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, backoff_s=30.0) as stage:
            stage.servers.failing["a"] = "no weights at /nowhere"
            status, headers, body = await stage.ask(model="a", prompt=1)
            assert status == 503 and "no weights at <path>" in body["error"]["message"]
            assert headers["x-request-id"] in body["error"]["message"]
            assert 1 <= int(headers["retry-after"]) <= 30
            assert (await stage.ask(model="a", prompt=2))[0] == 503
            assert (await stage.ask(model="b", prompt=3))[0] == 200
            assert [server.launch.name for server in stage.servers.begun] == ["a", "b"]
            said = _model(stage, "a")
            assert (said["state"], said["failures"]) == ("failed", 1) and said["retry_in_s"] > 0
            assert b'coldstart_host_failed_starts_total{model="a"} 1.0' in stage.driver.metrics.text()

    run(work())


def test_a_full_disk_is_a_start_that_failed_and_is_tried_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            stage.servers.full = True
            status, _, body = await stage.ask(model="a", prompt=1)
            assert status == 503 and "No space left on device" in body["error"]["message"]
            stage.servers.full = False
            await until(lambda: stage.driver.core.models["a"].retry_at < stage.driver.clock())
            assert (await stage.ask(model="a", prompt=1))[0] == 200

    run(work())


def test_a_start_past_its_deadline_is_ended(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hold=True, start_deadline_s=0.05) as stage:
            status, _, body = await stage.ask(model="a", prompt=1)
            assert status == 503 and "not ready within 0.05 s" in body["error"]["message"]
            assert stage.servers.of("a").ended.done()

    run(work())


def test_an_idle_model_goes(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {**TWO, "a": {**TWO["a"], "idle_s": 0.05}}) as stage:
            await stage.ask(model="a", prompt=1)
            await until(lambda: _model(stage, "a")["state"] == "stopped")
            await until(lambda: not stage.driver.lifecycle.residences)

    run(work())


def test_a_pinned_model_is_there_before_anybody_asks(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {**TWO, "a": {**TWO["a"], "pinned": True}}, memory=20) as stage:
            await until(lambda: _model(stage, "a")["state"] == "ready")
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            assert _model(stage, "a")["state"] == "ready"

    run(work())


def test_other_words_for_a_model_start_it_anew_and_its_stream_is_whole(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            long = asyncio.create_task(stage.events(model="a", prompt="x", pieces=30, pause_s=0.01))
            await until(lambda: _model(stage, "a")["in_flight"] == 1)
            changed = {"a": {**TWO["a"], "args": ["--max-model-len", "64"]}, "c": TWO["b"]}
            stage.driver.configure(_parsed(changed, max_held=7))
            assert (await stage.ask(model="b", prompt=1))[0] == 404
            later = asyncio.create_task(stage.ask(model="a", prompt="y"))
            assert len(await long) == 31
            assert (await later)[0] == 200
            assert [tuple(one.launch.args) for one in stage.servers.begun] == [(), ("--max-model-len", "64")]
            assert (await stage.ask(model="c", prompt=1))[0] == 200
            assert stage.driver.core.settings.max_held == 7

    run(work())


def test_the_same_words_leave_a_model_alone_and_wrong_ones_change_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            await stage.ask(model="a", prompt=1)
            stage.driver.configure(_parsed({**TWO, "a": {**TWO["a"], "idle_s": 99.0, "aliases": ["other"]}}))
            assert (await stage.ask(model="other", prompt=1))[0] == 200
            with pytest.raises(UsageError, match="pinned models need"):
                stage.driver.configure(_parsed({"a": {**TWO["a"], "pinned": True}}, memory=5))
            assert (await stage.ask(model="b", prompt=1))[0] == 200
            assert (await stage.ask(model="other", prompt=1))[0] == 200

    run(work())


def test_a_model_changed_while_it_starts_serves_whom_it_has_and_starts_anew(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hold=True) as stage:
            first = asyncio.create_task(stage.ask(model="a", prompt=1))
            await stage.servers.begins(1)
            stage.driver.configure(_parsed({**TWO, "a": {**TWO["a"], "args": ["--seed", "1"]}}))
            stage.servers.of("a").gate.set()
            assert (await first)[0] == 200
            await until(lambda: _model(stage, "a")["state"] == "stopped")
            stage.servers.hold = False
            assert (await stage.ask(model="a", prompt=2))[0] == 200
            assert [len(one.launch.args) for one in stage.servers.begun] == [0, 2]

    run(work())


def test_draining_refuses_what_waits_and_what_comes_and_ends_what_runs(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            long = asyncio.create_task(stage.events(model="a", prompt="x", pieces=30, pause_s=0.01))
            await until(lambda: _model(stage, "a")["in_flight"] == 1)
            waits = asyncio.create_task(stage.ask(model="b", prompt=1))
            await until(lambda: stage.driver.core.pending.oldest() is not None)
            stage.driver.drain()
            assert (await waits)[0] == 503
            assert (await stage.ask(model="a", prompt=1))[0] == 503
            async with stage.client.get(stage.url + "/health") as answer:
                assert answer.status == 503
            assert len(await long) == 31
            await until(lambda: not stage.driver.lifecycle.residences)
            assert not stage.servers.of("a").socket.exists()

    run(work())


def test_what_a_model_really_holds_is_booked(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            await stage.ask(model="a", prompt=1)
            stage.driver.lifecycle.on_measured("a", 12)
            assert (_model(stage, "a")["held_bytes"], _model(stage, "a")["memory_source"]) == (12, "observed")
            # More than the host has: it must go, and is refused from then on.
            stage.driver.lifecycle.on_measured("a", 99)
            await until(lambda: _model(stage, "a")["state"] == "stopped")
            assert (await stage.ask(model="a", prompt=1))[0] == 507

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_a_stream_goes_on_at_the_next_server_where_that_is_wanted(tmp_path: Path, wanted: bool) -> None:
    async def work() -> None:
        async with staged(tmp_path, resume_streams=wanted) as stage:
            stage.servers.pause_s = 0.01
            said = [
                asyncio.create_task(stage.events(model="a", prompt=f"p{n}", max_tokens=40, temperature=0))
                for n in range(5)
            ]
            await stage.servers.begins(1)
            first = stage.servers.of("a")
            await until(lambda: len(first.asked) == 5)
            await until(lambda: stage.driver.facts.of("a").chunks_streamed >= 20)
            first.over.set()
            for n, lines in enumerate(await asyncio.gather(*said)):
                events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
                assert ("error" in events[-1]) is not wanted
                if wanted:
                    made = [int(one["choices"][0]["text"]) for one in events]
                    assert made == generated(f"p{n}", 40) and lines[-1] == b"data: [DONE]"
            assert len(stage.servers.begun) == (2 if wanted else 1) and stage.idle()
            if wanted:
                # Not a second time: it may be the stream that its servers die of.
                stage.servers.break_after = 5
                lines = await stage.events(model="a", prompt="x", max_tokens=40, temperature=0)
                assert b"broke off" in lines[-1]

    run(work())
