"""The handle of an embedded server: state, exit codes, and its end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import has_ended, wait_until
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import driver, ladder, planning, server_process
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

Start = Callable[..., Server]
HERE, PYTHON = Path(__file__).parent, sys.executable
HOLDER = """
import os, signal, sys
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import driver, planning
from test_server import make_request
sys.executable = sys.argv[1]
planning.plan = lambda request: LaunchPlan(Arguments(["serves"]))
print(driver.start(make_request()).pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make_request() -> ServeRequest:
    """Return a request for a model that is never read; its plan is a fake."""
    model, cache = ResolvedModel("tiny", Path("tiny"), None, None, {}), Cache(Path("cache"))
    return ServeRequest(
        Lookup(model, Arguments(), cache, key()), mode="fresh", without_bundle=True, ready_timeout=20
    )


@pytest.fixture
def start(home: Path, fake_engine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return start(behaviour), which starts a server of the fake engine that is stopped afterwards."""
    fake_engine("serves")
    started: list[Server] = []

    def run(behaviour: str = "serves") -> Server:
        plan = LaunchPlan(Arguments([behaviour, "--port", "7"]))
        monkeypatch.setattr(planning, "plan", lambda request: plan)
        started.append(driver.start(make_request()))
        return started[-1]

    yield run
    for one in started:
        one.stop(timeout_s=0)


def _is_alive(pid: int) -> bool:
    return not has_ended(pid)


def test_server_has_ended_after_the_block(start: Start) -> None:
    with start() as one:
        assert one.is_running() and _is_alive(one.pid)
        assert (one.url, one.mode, one.fallbacks) == ("http://127.0.0.1:7", "fresh", ())
        assert 0 < one.ready_s < 20
    assert not one.is_running() and not _is_alive(one.pid)
    assert one.wait() == one.stop() == 143


def test_stop_kills_when_the_server_ignores_sigterm(start: Start) -> None:
    assert start("stubborn").stop(timeout_s=0.2) == 137


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_server_ends_with_the_process_that_started_it(start: Start, end: str) -> None:
    command = [PYTHON, "-c", HOLDER, sys.executable, end]
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        server = int(holder.stdout.readline())
        # The fake server ends by itself after 60 s.
        wait_until(lambda: not _is_alive(server), 30.0)


def test_server_stops_when_its_caller_was_interrupted_during_the_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, started, real = threading.Event(), list[Server](), ladder.start

    def slow(request: ServeRequest, plan: LaunchPlan) -> Server:
        started.append(real(request, plan))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait(20)
        return started[-1]

    monkeypatch.setattr(ladder, "start", slow)
    # A shell that runs the tests in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupted.set()
    wait_until(lambda: not _is_alive(started[0].running.process.pid))


CHILD = """
import sys
from coldstart.system.start_progress import StartProgress, write_progress
for done in (1, 2):
    write_progress(int(sys.argv[1]), StartProgress("profile", done, 2, "sizes"))
sys.exit(3)
"""


def _run(program: str) -> tuple[int, list[str]]:
    said: list[str] = []
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, str(writer)], pass_fds=[writer])
    os.close(writer)
    code = server_process.await_exit(process, reader, lambda one: said.append(one.describe()))
    os.close(reader)
    return code, said


def test_wait_returns_the_exit_code_after_each_report() -> None:
    assert _run(CHILD) == (3, ["profile: 1 of 2 sizes", "profile: 2 of 2 sizes"])
