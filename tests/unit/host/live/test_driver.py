"""The live host with fake servers: start, eviction and reconfiguration of models during requests."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fake_model import generated
from support.fake_upstream import TWO, Stage, parsed, staged, wait_until

from coldstart.contract.graphs import WORKER_REPORT
from coldstart.errors import UsageError
from coldstart.host.live import lifecycle
from coldstart.host.live.profiles import MemoryMeter
from coldstart.system.devices import parker
from coldstart.system.devices.parking import CHECKPOINTED, RUNNING


async def test_a_model_makes_room_for_another_and_comes_back(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for name in "abab":
            assert (await stage.ask(model=name, prompt=name))[2]["model"] == name
        assert [server.launch.name for server in stage.servers.begun] == list("abab")
        assert [one["tier"] for one in (stage.model("a"), stage.model("b"))] == ["stopped", "awake"]
        said: Any = stage.driver.status()
        assert (said["starts"]["total"], said["starts"]["departures"]) == (4, 3)
        assert [one["mode"] for one in said["recent_starts"]] == ["fake"] * 4
        assert [one["phases"] for one in said["recent_starts"]] == [{"read tensors": 0.5}] * 4


async def test_start_is_retried_after_a_full_disk(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.servers.full = True
        status, _, body = await stage.ask(model="a", prompt=1)
        assert status == 503 and "No space left on device" in body["error"]["message"]
        stage.servers.full = False
        await wait_until(lambda: stage.driver.core.models["a"].retry_at < stage.driver.clock())
        assert (await stage.ask(model="a", prompt=1))[0] == 200


async def test_a_start_past_its_deadline_is_ended(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True, ready_timeout_s=0.05) as stage:
        status, _, body = await stage.ask(model="a", prompt=1)
        assert status == 503 and "not ready within 0.05 s" in body["error"]["message"]
        assert stage.servers.last("a").ended.done()


async def test_request_that_waits_longer_than_hold_s_is_rejected(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True, hold_s=0.05) as stage, asyncio.timeout(30):
        assert (await stage.ask(model="a", prompt=1))[0] == 504


async def test_changed_arguments_restart_a_model_after_its_streams(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        long = asyncio.create_task(stage.events(model="a", prompt="x", pieces=30, pause_s=0.01))
        await wait_until(lambda: stage.model("a")["in_flight"] == 1)
        changed = {"a": {**TWO["a"], "args": ["--max-model-len", "64"]}, "c": TWO["b"]}
        stage.driver.configure(parsed(changed, max_held=7))
        assert (await stage.ask(model="b", prompt=1))[0] == 404
        later = asyncio.create_task(stage.ask(model="a", prompt="y"))
        assert len(await long) == 31
        assert (await later)[0] == 200
        assert [tuple(one.launch.args) for one in stage.servers.begun] == [(), ("--max-model-len", "64")]
        assert (await stage.ask(model="c", prompt=1))[0] == 200
        assert stage.driver.core.settings.max_held == 7


LARGER = {**TWO, "a": {**TWO["a"], "args": ["--max-num-seqs", "64"]}}
ROOM = {"memory": 25, "resume_streams": True}


@asynccontextmanager
async def _replacing(path: Path, *, holds_kv: bool = True) -> AsyncIterator[tuple[Stage, Any, Any, Any]]:
    """Yield a stage whose model `a` gets a second server for its new arguments, the two servers, and a stream of the first."""
    async with staged(path, **ROOM) as stage:
        stage.servers.pause_s, stage.servers.holds_kv = 0.01, holds_kv
        stream = asyncio.create_task(stage.events(model="a", prompt="x", max_tokens=120, temperature=0))
        await wait_until(lambda: stage.driver.facts.get_model("a").chunks_streamed >= 3)
        stage.servers.hold = True
        for _ in range(2):  # a second reload starts no third server
            stage.driver.configure(parsed(LARGER, **ROOM))
        await stage.servers.begins(2)
        assert stage.model("a")["held_bytes"] == 20
        # Until the second server is ready, the first one serves all requests.
        assert (await stage.ask(model="a", prompt="y"))[0] == 200
        first, second = stage.servers.begun
        assert first.asked[-1] == "y" and not second.asked
        yield stage, first, second, stream
        events = [json.loads(line[6:]) for line in await stream if line.startswith(b"data: {")]
        assert [int(one["choices"][0]["text"]) for one in events] == generated("x", 120)


@pytest.mark.parametrize(("weights", "holds_kv"), [("same", True), ("same", False), ("other", True)])
async def test_server_with_new_arguments_takes_over(tmp_path: Path, weights: str, holds_kv: bool) -> None:
    async with _replacing(tmp_path, holds_kv=holds_kv) as (stage, first, second, _):
        stage.servers.weights = weights
        second.gate.set()
        await first.ended
        moves, moved = stage.driver.moves, weights == "same"
        await wait_until(lambda: (moves.moved_count, moves.moved_with_kv) == (moved, moved and holds_kv))
        await wait_until(lambda: stage.model("a")["held_bytes"] == 10)
        assert (await stage.ask(model="a", prompt="z"))[0] == 200 and second.asked[-1] == "z"
        assert len(stage.servers.begun) == stage.model("a")["starts"] == stage.model("a")["hits"] == 2


@pytest.mark.parametrize("end", ["fails", "unload", "revert"])
async def test_server_stays_until_its_requests_end_if_it_is_not_replaced(tmp_path: Path, end: str) -> None:
    async with _replacing(tmp_path) as (stage, first, second, stream):
        if end == "unload":
            stage.driver.stop_models("a")
        elif end == "revert":
            stage.driver.configure(parsed(**ROOM))
            second.gate.set()
        else:
            second.over.set()
        await stream
        await second.ended
        await wait_until(lambda: stage.model("a")["held_bytes"] == (0 if end == "unload" else 10))
        assert not stage.driver.moves.moved_count
        if end == "unload":
            assert first.ended.done() and stage.model("a")["state"] == "stopped"
        else:
            assert (await stage.ask(model="a", prompt="z"))[0] == 200 and first.asked[-1] == "z"


async def test_stream_continues_at_the_next_server_if_both_servers_die(tmp_path: Path) -> None:
    async with _replacing(tmp_path) as (stage, first, second, stream):
        stage.servers.hold = False
        first.over.set()
        await second.ended
        await stream
        assert len(stage.servers.begun) == 3 and stage.model("a")["held_bytes"] == 10


async def test_replacement_that_is_unwanted_before_it_starts_is_forgotten(tmp_path: Path) -> None:
    async with staged(tmp_path, **ROOM) as stage:
        stream = asyncio.create_task(stage.events(model="a", prompt="x", pieces=9, pause_s=0.01))
        await wait_until(lambda: stage.model("a")["in_flight"] == 1)
        stage.driver.configure(parsed(LARGER, **ROOM))
        stage.driver.stop_models("a")
        await stream
        await wait_until(lambda: stage.model("a")["state"] == "stopped")
        for models in (TWO, LARGER):
            stage.driver.configure(parsed(models, **ROOM))
            assert (await stage.ask(model="a", prompt="y"))[0] == 200
        found = ["--max-num-seqs" in one.launch.args for one in stage.servers.begun]
        assert found == [False, False, True]


async def test_end_of_a_replaced_server_does_not_end_a_later_replacement(tmp_path: Path) -> None:
    async with _replacing(tmp_path) as (stage, first, second, _):
        # The stream stays at the first server, which ends after it.
        stage.servers.weights, stage.servers.hold, stage.servers.pause_s = "other", False, 0.1
        second.gate.set()
        await wait_until(lambda: stage.model("a")["starts"] == 2)
        second.over.set()
        model = stage.driver.core.models["a"]
        await wait_until(lambda: model.consecutive_failures and model.retry_at < stage.driver.clock())
        later = asyncio.create_task(stage.events(model="a", prompt="y", max_tokens=120, temperature=0))
        await wait_until(lambda: stage.model("a")["starts"] == 3 and stage.model("a")["in_flight"] == 1)
        stage.servers.hold = True
        stage.driver.configure(parsed({**TWO, "a": {**TWO["a"], "args": ["--seed", "1"]}}, **ROOM))
        await stage.servers.begins(4)
        stage.servers.pause_s = 0
        await first.ended
        await later
        third, fourth = stage.servers.begun[2:]
        fourth.gate.set()
        await third.ended
        assert (await stage.ask(model="a", prompt="z"))[0] == 200 and fourth.asked[-1] == "z"


async def test_replacement_is_cancelled_when_its_model_goes_to_sleep(tmp_path: Path) -> None:
    def models(*args: str) -> dict[str, Any]:
        asleep = {"name": "asleep-1", "memory": 2, "penalty_s": 0.1, "host_memory": 8}
        return {**TWO, "a": {**TWO["a"], "tiers": [asleep], "args": [*SLEEP, *args]}}

    async with staged(tmp_path, models(), memory=25, host_memory=8) as stage:
        stage.servers.sleeps = True
        stream = asyncio.create_task(stage.events(model="a", prompt="x", pieces=9, pause_s=0.01))
        await wait_until(lambda: stage.model("a")["in_flight"] == 1 and stage.model("a")["mode"])
        stage.servers.hold = True
        stage.driver.configure(parsed(models("--seed", "1"), memory=25, host_memory=8))
        await stage.servers.begins(2)
        await stream
        stage.servers.hold = False
        assert (await stage.ask(model="b", prompt=1))[0] == 200
        first, second, _ = stage.servers.begun
        assert "/sleep?level=1" in first.paths and second.ended.done()


async def test_equal_or_invalid_arguments_do_not_restart_a_model(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.ask(model="a", prompt=1)
        stage.driver.configure(parsed({**TWO, "a": {**TWO["a"], "idle_s": 99.0, "aliases": ["other"]}}))
        assert (await stage.ask(model="other", prompt=1))[0] == 200
        with pytest.raises(UsageError, match="pinned models need"):
            stage.driver.configure(parsed({"a": {**TWO["a"], "pinned": True}}, memory=5))
        assert (await stage.ask(model="b", prompt=1))[0] == 200
        assert (await stage.ask(model="other", prompt=1))[0] == 200


async def test_model_changed_during_its_start_serves_waiting_requests_and_restarts(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True) as stage:
        first = asyncio.create_task(stage.ask(model="a", prompt=1))
        await stage.servers.begins(1)
        stage.driver.configure(parsed({**TWO, "a": {**TWO["a"], "args": ["--seed", "1"]}}))
        stage.servers.last("a").gate.set()
        assert (await first)[0] == 200
        await wait_until(lambda: stage.model("a")["state"] == "stopped")
        stage.servers.hold = False
        assert (await stage.ask(model="a", prompt=2))[0] == 200
        assert [len(one.launch.args) for one in stage.servers.begun] == [0, 2]


async def test_drain_refuses_waiting_and_new_requests_and_ends_streams(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        long = asyncio.create_task(stage.events(model="a", prompt="x", pieces=30, pause_s=0.01))
        await wait_until(lambda: stage.model("a")["in_flight"] == 1)
        waits = asyncio.create_task(stage.ask(model="b", prompt=1))
        await wait_until(lambda: bool(stage.driver.core.agenda.waiting))
        stage.driver.drain()
        assert (await waits)[0] == 503
        assert (await stage.ask(model="a", prompt=1))[0] == 503
        assert (await stage.get("/health"))[0] == 503
        assert len(await long) == 31
        await wait_until(lambda: not stage.driver.lifecycle.replicas)
        assert not stage.servers.last("a").socket.exists()


async def test_observed_memory_of_model_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MEASURE_FIRST_S", 0.01)
    monkeypatch.setattr(lifecycle, "MEASURE_EVERY_S", 0.01)
    sizes = [12]
    meter = MemoryMeter(on_cpu=True)
    meter.measure_pss_bytes = lambda _: sizes[-1]  # type: ignore[method-assign]
    async with staged(tmp_path, meter=meter) as stage:
        await stage.ask(model="a", prompt=1)
        await wait_until(lambda: stage.model("a")["memory_source"] == "observed")
        assert stage.model("a")["held_bytes"] == 12
        # More than the host's memory: the model stops and is refused from then on.
        sizes.append(99)
        await wait_until(lambda: stage.model("a")["state"] == "stopped")
        assert (await stage.ask(model="a", prompt=1))[0] == 507


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
async def test_stream_continues_at_the_next_server_when_enabled(tmp_path: Path, wanted: bool) -> None:
    async with staged(tmp_path, resume_streams=wanted) as stage:
        stage.servers.pause_s = 0.01
        said = [
            asyncio.create_task(stage.events(model="a", prompt=f"p{n}", max_tokens=40, temperature=0))
            for n in range(5)
        ]
        await stage.servers.begins(1)
        first = stage.servers.last("a")
        await wait_until(lambda: len(first.asked) == 5)
        await wait_until(lambda: stage.driver.facts.get_model("a").chunks_streamed >= 20)
        first.over.set()
        for n, lines in enumerate(await asyncio.gather(*said)):
            events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            assert ("error" in events[-1]) is not wanted
            if wanted:
                made = [int(one["choices"][0]["text"]) for one in events]
                assert made == generated(f"p{n}", 40) and lines[-1] == b"data: [DONE]"
        # A request that is sent again counts once.
        assert (len(stage.servers.begun), stage.model("a")["requests"]) == (1 + wanted, 5) and stage.idle()
        if wanted:
            # Only once, because the stream may be the cause of the failures.
            stage.servers.break_after = 5
            lines = await stage.events(model="a", prompt="x", max_tokens=40, temperature=0)
            assert b"disconnected" in lines[-1]


SLEEP = ["--enable-sleep-mode"]


@pytest.mark.parametrize(
    ("tier", "wakes"),
    [
        ("asleep-1", ["/wake_up"]),
        # vLLM discards the weights at level 2, and no wake-up loads them.
        ("asleep-2", ["/wake_up?tags=weights", "/collective_rpc reload_weights", "/wake_up?tags=kv_cache"]),
        ("asleep-1", None),
    ],
)
async def test_evicted_model_sleeps_when_its_server_can_else_stops(
    tmp_path: Path, tier: str, wakes: list[str] | None
) -> None:
    # A server without a sleeping tier keeps vLLM's routes for development closed.
    tiers = [{"name": tier, "memory": 2, "penalty_s": 0.1, "host_memory": 8}]
    models = {"a": {**TWO["a"], "tiers": tiers, "args": SLEEP}, "b": {**TWO["b"], "args": SLEEP}}
    async with staged(tmp_path, models, memory=12, host_memory=8) as stage:
        stage.servers.sleeps = wakes is not None
        await stage.ask(model="a", prompt=1)
        assert (await stage.ask(model="b", prompt=2))[0] == 200
        assert stage.model("a")["tier"] == (tier if wakes else "stopped")
        assert [one.env for one in stage.servers.begun] == [{"VLLM_SERVER_DEV_MODE": "1"}, {}]
        assert (await stage.ask(model="a", prompt=3))[0] == 200
        assert [one.launch.name for one in stage.servers.begun] == (["a", "b"] if wakes else ["a", "b", "a"])
        slept = ["/v1/completions", f"/sleep?level={tier[-1]}"]
        assert stage.servers.begun[0].paths == ([*slept, *wakes, "/v1/completions"] if wakes else slept)
        text = stage.driver.metrics.format_text().decode()
        # Waking has no stages: those of the start are counted once.
        loads = 2 if wakes else 3
        assert f'coldstart_start_phase_seconds_count{{mode="fake",phase="read tensors"}} {loads}.0' in text
        assert 'phase="read tensors"' not in "".join(line for line in text.splitlines() if tier in line)


@pytest.mark.parametrize("fault", ["", "the workers", "the driver", "a rank dies", "the server dies"])
async def test_sleeping_model_is_parked_when_another_needs_the_rest_of_its_memory(
    tmp_path: Path, checkpoints: Path, fault: str
) -> None:
    tiers = [
        {"name": "asleep-1", "memory": 4, "penalty_s": 0.1},
        {"name": "parked", "memory": 0, "penalty_s": 0.2},
    ]
    models = {**TWO, "a": {**TWO["a"], "tiers": tiers, "args": SLEEP}, "c": {**TWO["b"], "memory": 14}}
    rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    state = checkpoints / str(rank.pid)
    state.write_text(str(RUNNING))
    async with staged(tmp_path, models) as stage:
        stage.servers.sleeps = True
        stage.servers.reports = [None if fault == "the workers" else {"pid": rank.pid}]
        for name in "ab":
            assert (await stage.ask(model=name, prompt=1))[0] == 200
        assert stage.model("a")["tier"] == "asleep-1" and state.read_text() == str(RUNNING)
        if fault == "the driver":
            (checkpoints / "fail").write_text("1 error")
        assert (await stage.ask(model="c", prompt=1))[0] == 200
        parks = fault not in ("the workers", "the driver")
        assert stage.model("a")["tier"] == ("parked" if parks else "stopped")
        assert state.read_text() == str(CHECKPOINTED if parks else RUNNING)
        first = stage.servers.begun[0]
        if fault == "a rank dies":
            rank.kill()
            rank.wait()
            status, _, body = await stage.ask(model="a", prompt=2)
            assert status == 503 and "CUDA_ERROR_INVALID_VALUE" in body["error"]["message"]
        elif fault == "the server dies":
            first.over.set()
            await wait_until(lambda: stage.model("a")["state"] == "failed")
        await wait_until(lambda: stage.driver.core.models["a"].retry_at < stage.driver.clock())
        assert (await stage.ask(model="a", prompt=2))[0] == 200
        assert len([one for one in stage.servers.begun if one.launch.name == "a"]) == (1 if not fault else 2)
        if not fault:
            orders = WORKER_REPORT, "checkpoint_prepare", "checkpoint_restore"
            rpc = [f"/collective_rpc {name}" for name in orders]
            assert first.paths == ["/v1/completions", "/sleep?level=1", *rpc, "/wake_up", "/v1/completions"]
            assert state.read_text() == str(RUNNING)
    rank.kill()
    rank.communicate()
    assert not [one for one in psutil.Process().children() if parker.__name__ in one.cmdline()]
