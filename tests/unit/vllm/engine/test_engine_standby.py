"""An engine in vLLM's sleep mode is woken for one server at a time: real vLLM with a fake allocator."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.processes import has_ended, wait_until
from tools import tiny_models

from coldstart.contract.plan import READY_FD_ENV, SLEEP_LEVELS, LaunchPlan
from coldstart.host.launches import Launch
from coldstart.host.live.lifecycle import LocalReplica
from coldstart.host.live.servers import ReadyServer
from coldstart.launch import server_process
from coldstart.system import paths, timeline
from coldstart.system.devices import parking
from coldstart.system.ipc import addresses, peers

DOUBLE = Path(__file__).parents[3] / "support" / "sleeping_engine.py"
READY_S = 240.0
STAGES = {
    "asleep-1": ["wake the engine"],
    "asleep-2": ["wake the engine", "load weights", "allocate the KV cache"],
}
# The application is built while the engine wakes.
WOKEN = {"asleep-1": ["build", "wake None"], "asleep-2": ["build", "wake ['weights']", "wake ['kv_cache']"]}


@dataclass
class Resident:
    """The sleeping process, and requests to its servers."""

    process: subprocess.Popen[bytes]
    socket: Path
    arguments: list[str]
    port: int = 0
    stages: list[str] = field(default_factory=list)

    def serve(self, *more: str) -> server_process.ReadyServer:
        """Start a server of the process on a free port."""
        began, self.port = timeline.now(), addresses.find_free_port()
        self.stages.clear()
        plan = LaunchPlan([*self.arguments, "--port", str(self.port), *more], key="k")
        launched = server_process.fork_server(plan, self.socket)
        return server_process.await_readiness(
            *launched, began, READY_S, lambda progress: self.stages.append(progress.phase)
        )

    def ask(self, count: int = 4, key: str = "") -> str:
        """Return the text that follows a fixed prompt."""
        body = {"model": "tiny", "prompt": "Once", "max_tokens": count, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def worker_calls(self) -> list[str]:
        """Return the calls of the worker so far."""
        return self.socket.with_name("asked").read_text().splitlines()


def _start(place: Path, level: str, *more: str) -> tuple[Resident, int]:
    """Start the double, and return it with the descriptor on which it reports that it is ready."""
    model = tiny_models.shared("tiny-llama")
    arguments = ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", "512", *more]
    arguments += ["--kv-cache-memory-bytes", str(1 << 27), "--enable-sleep-mode", "--enforce-eager"]
    place.mkdir(mode=0o700)
    (place / "plan.json").write_text(json.dumps(LaunchPlan(arguments, key="k").document()))
    reader, writer = os.pipe()
    with (place / "log").open("wb") as log, (place / "plan.json").open() as plan:
        argv = [sys.executable, "-P", DOUBLE, place / "socket", level, str(plan.fileno())]
        env = os.environ | {"VLLM_CACHE_ROOT": str(tiny_models.VLLM_CACHES), READY_FD_ENV: str(writer)}
        process = subprocess.Popen(
            argv, env=env, pass_fds=(plan.fileno(), writer), stdout=log, stderr=log, start_new_session=True
        )
    os.close(writer)
    return Resident(process, place / "socket", arguments), reader


@pytest.fixture
def resident(request: pytest.FixtureRequest, home: Path) -> Iterator[Resident]:
    started, reader = _start(home / "resident", request.param)
    try:
        assert os.read(reader, 3) == b"{}\n", started.socket.with_name("log").read_text()[-3000:]
        yield started
    finally:
        os.close(reader)
        started.process.kill()
        started.process.wait()


def _end(running: server_process.ReadyServer) -> int:
    running.process.signal(signal.SIGTERM)
    return running.process.wait()


@pytest.mark.vllm
@pytest.mark.timeout(3 * READY_S)
@pytest.mark.parametrize(
    "resident", ["asleep-1", pytest.param("asleep-2", marks=pytest.mark.nightly)], indirect=True
)
def test_engine_wakes_for_one_server_at_a_time_and_sleeps_again(
    resident: Resident, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = request.node.callspec.params["resident"]
    slept = f"sleep {level[-1]}"
    assert resident.worker_calls() == [slept]
    first = resident.serve()
    assert resident.worker_calls() == [slept, *WOKEN[level]]
    assert resident.stages == STAGES[level]
    # The backend has kept one copy of the weights at level 1, and none at level 2.
    assert len(list((paths.runtime_dir() / "sleep").glob("*.json"))) == (level == "asleep-1")
    assert first.report["fallbacks"] == []
    tokens, text, port = first.report["tokens"], resident.ask(), resident.port
    assert tokens != [0], "weights that are zero find every token alike, and take the first"
    with pytest.raises(peers.PeerError, match="already runs another server"):
        resident.serve()
    resident.port = port
    # The end of the lease breaks a running answer without delay.
    answers: list[str] = []

    def one() -> None:
        with suppress(OSError, ValueError):  # closed connection or incomplete answer
            answers.append(resident.ask(480))

    pending = threading.Thread(target=one)
    pending.start()
    assert _end(first) == 0 and resident.worker_calls()[-1] == slept
    pending.join(30)
    assert not pending.is_alive()
    with pytest.raises(urllib.error.URLError):
        resident.ask()

    with pytest.raises(server_process.ServerExitedError, match="different values of max_num_seqs"):
        resident.serve("--max-num-seqs", "3")
    assert resident.worker_calls()[-1] == slept
    # A client with a missing directory receives an error; the engine is unaffected.
    gone, where = resident.socket.with_name("gone"), Path.cwd()
    gone.mkdir()
    monkeypatch.setattr(server_process.Path, "cwd", lambda: gone)
    gone.rmdir()
    with pytest.raises(server_process.ServerExitedError, match="before it was ready"):
        resident.serve()
    monkeypatch.setattr(server_process.Path, "cwd", lambda: where)
    # Another server has a different API key and complete weights.
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    second = resident.serve()
    assert resident.stages == STAGES[level]
    assert second.report["tokens"] == tokens and resident.ask(key="secret") == text
    with pytest.raises(urllib.error.HTTPError, match="401"):
        resident.ask()
    assert resident.socket.with_name("serving").exists()
    # A signal ends the sleeping process and its server.
    resident.process.terminate()
    assert resident.process.wait(60) == 0 and second.process.wait() in (0, 1)


@pytest.mark.vllm
@pytest.mark.timeout(3 * READY_S)
@pytest.mark.parametrize("resident", ["parked"], indirect=True)
def test_parked_engine_returns_to_its_device_for_a_server_and_only_sleeps_when_the_driver_fails(
    checkpoints: Path, resident: Resident
) -> None:
    (state,) = (path for path in checkpoints.iterdir() if path.name.isdigit())
    parked, running = str(parking.CHECKPOINTED), str(parking.RUNNING)
    asleep = ["sleep 1", "prepare"]
    assert resident.worker_calls() == asleep and state.read_text() == parked

    def fail(after: int) -> None:
        """Let the driver fail in the call that follows this many others."""
        number = after + len((checkpoints / "calls").read_text().splitlines())
        (checkpoints / "fail").write_text(f"{number} error")

    first = resident.serve()
    assert resident.stages == ["restore the device", "wake the engine"]
    assert resident.worker_calls() == [*asleep, "restore", "build", "wake None"]
    assert state.read_text() == running
    text, tokens = resident.ask(), first.report["tokens"]
    assert tokens != [0] and first.report["fallbacks"] == []
    # A server has ended when its engine is parked again.
    assert _end(first) == 0 and state.read_text() == parked

    # Restored too early, the engine stays parked, and the next start succeeds.
    fail(0)
    with pytest.raises(server_process.ServerExitedError, match="restore failed: CUDA_ERROR_UNKNOWN"):
        resident.serve()
    assert state.read_text() == parked
    second = resident.serve()
    assert (resident.ask(), second.report["tokens"]) == (text, tokens)

    # An engine that cannot be parked sleeps, and its next server reports that.
    fail(1)
    assert _end(second) == 0
    third = resident.serve()
    assert resident.stages[-1] == "wake the engine" and resident.ask() == text
    (fallback,) = third.report["fallbacks"]
    assert fallback["section"] == "parked" and "checkpoint failed: CUDA_ERROR_UNKNOWN" in fallback["reason"]
    assert _end(third) == 0 and state.read_text() == parked
    # An engine whose device is parked cannot react to a signal; it ends with its template all the same.
    engine = psutil.Process(int(state.name))
    engine.suspend()
    resident.process.kill()
    wait_until(lambda: has_ended(engine.pid))


@pytest.mark.vllm
@pytest.mark.timeout(2 * READY_S)
@pytest.mark.parametrize("tier", ["asleep-2", pytest.param("parked", marks=pytest.mark.nightly)])
async def test_server_has_its_weights_when_its_host_wakes_it(
    home: Path, checkpoints: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDSTART_SLEEP_MEMORY_BYTES", "1")  # too little for a copy of the weights
    port = addresses.find_free_port()
    hosted, reader = _start(home / "hosted", "server", "--port", str(port))
    process, hosted.port = server_process.ChildServer(hosted.process), port
    try:
        report = server_process.await_readiness(process, reader, timeline.now(), READY_S).report
        assert report["fast_path"]["sleep"] and not report["fallbacks"]
        server: Any = SimpleNamespace(socket=("127.0.0.1", port))
        replica = LocalReplica(Launch("tiny", "tiny"), server, 0.0)
        replica.ready = ReadyServer("", None, report)
        text, calls = hosted.ask(), [f"sleep {SLEEP_LEVELS[tier]}"]
        await replica.sleep(tier)
        (state,) = (path for path in checkpoints.iterdir() if path.name.isdigit())
        if tier == "parked":
            assert state.read_text() == str(parking.CHECKPOINTED)
            calls += ["prepare", "restore"]
        await replica.wake()
        assert state.read_text() == str(parking.RUNNING) and hosted.ask() == text
        # Weights without a copy are loaded again; at level 2 that is no fallback.
        reasons = [one.reason for one in replica.fallbacks]
        assert len(reasons) == (tier == "parked") and all("loaded again" in one for one in reasons)
        assert hosted.worker_calls() == [*calls, *WOKEN.get(tier, WOKEN["asleep-1"])[1:]]
        if replica.parked is not None:
            await replica.parked.close()
        replica.upstream.close()
    finally:
        process.signal(signal.SIGKILL)
        process.wait()
