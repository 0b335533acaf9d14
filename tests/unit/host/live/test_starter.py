"""The starter process and its supervisors, with fake work instead of a server's start."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import has_ended, wait_until
from tools.tiny_models import write_empty

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import SUPERVISOR_PID
from coldstart.errors import NoBundleError
from coldstart.host.core import Core
from coldstart.host.events import ModelFailed, RejectRequest, RequestArrived
from coldstart.host.launches import Launch
from coldstart.host.live import starter as starter_module
from coldstart.host.live.log import describe_failure
from coldstart.host.live.starter import StartOrder, _guard, supervise
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.launch.template_pool import RunningTemplate
from coldstart.system.ipc import json_lines

# What a supervisor does, by the message's `does`.
SOURCE = """
import os, socket, sys, time
from coldstart.host.live import starter
from coldstart.system.ipc import json_lines
def run(message, channel):
    print("said", flush=True)
    try:
        channel.send({"ready": {"pid": os.getpid()}})
        if message["does"] == "ends":
            return 3
        time.sleep(60)
    finally:
        if message["does"] != "ends":
            channel.send({"cleaned": True})
starter.serve_forever(json_lines.Channel(socket.socket(fileno=int(sys.argv[1]))), run)
"""


class Starter:
    """One starter with a lease for each order."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", SOURCE, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        self.channel, self.log = json_lines.Channel(ours), directory / "log"

    def order(self, does: str) -> json_lines.Channel:
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self.channel.send({"does": does}, (theirs.fileno(), log.fileno()))
        return json_lines.Channel(ours)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    made = Starter(tmp_path)
    yield made
    made.channel.close()
    assert made.process.wait(30) == 0


def test_client_learns_how_to_build_the_bundle_that_a_start_lacks(tmp_path: Path) -> None:
    model, message = str(tmp_path / "model"), _describe_start(tmp_path, args=Arguments(["--seed", "1"]))
    with pytest.raises(NoBundleError) as missing:
        supervise(message, SimpleNamespace(send=lambda _: None))  # type: ignore[arg-type]
    failure = describe_failure(missing.value)
    assert failure and failure.hint == f"run `coldstart materialize {model} -- --seed 1`, then retry"
    core = Core([ModelSpec.with_two_tiers("m", 10, 1.0)], HostSettings(memory=10, policy="lru"))
    core.handle(RequestArrived("1", "m"), 0.0)
    failed = ModelFailed("m", failure.message, hint=failure.hint, code=failure.code)
    (refused,) = core.handle(failed, 1.0)
    assert isinstance(refused, RejectRequest)
    assert failure.message.replace(model, "<path>") in refused.reason
    assert refused.hint == "run `coldstart materialize <path> -- --seed 1`, then retry"


@pytest.mark.parametrize("how", ["lease", "starter"])
def test_processes_end_with_their_lease_but_outlive_the_starter(starter: Starter, how: str) -> None:
    lease = starter.order("stays")
    (said,) = [next(lease.iterate_replies())]
    if how == "starter":
        starter.channel.close()
        starter.process.wait(30)
        os.kill(said["ready"]["pid"], 0)
    lease.close()
    wait_until(lambda: has_ended(said["ready"]["pid"]))


def test_supervisors_that_ended_leave_no_zombie(starter: Starter) -> None:
    with starter.order("ends") as lease:
        first, *_ = lease.iterate_replies()
        pid = first["ready"]["pid"]
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_retired_template_is_hidden_and_ends_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell with one child replaces a template with one server."""
    monkeypatch.setattr(starter_module, "RETIRES_S", 0.01)
    ours, theirs = socket.socketpair()
    words = ["sh", "-c", "sleep 600 & echo $!; wait; read nothing"]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        json_lines.Channel(ours) as there,
    ):
        assert process.stdout is not None
        server = int(process.stdout.readline())
        warm = RunningTemplate("runtime", "key", tmp_path, "tiny", process.pid)
        warm.socket.touch()
        said, stops, stops_beside_server = list[Any](), list[bool](), list[int]()

        def retire() -> None:
            said.extend(there.receive() or ())
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: not warm.socket.exists())
            time.sleep(0.2)
            stops_beside_server.append(len(stops))
            os.kill(server, signal.SIGKILL)

        before = signal.getsignal(signal.SIGUSR1)
        thread = threading.Thread(target=retire, daemon=True)
        thread.start()
        try:
            assert _guard(warm, json_lines.Channel(theirs), lambda: stops.append(True)) == 0
        finally:
            signal.signal(signal.SIGUSR1, before)
        thread.join()
        assert said == [{"ready": {"mode": "template-runtime", "pid": process.pid}}]
        assert process.poll() is None and len(stops) == 1 and stops_beside_server == [0]
        process.kill()


def test_killed_template_is_reported_as_killed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    before = signal.getsignal(signal.SIGUSR1)
    with json_lines.Channel(ours) as there:
        warm = RunningTemplate("runtime", "key", tmp_path, "tiny", process.pid)
        try:
            assert _guard(warm, json_lines.Channel(theirs), lambda: None) == 0
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [said["code"] for said in there.receive() or () if "code" in said] == [137]


GATEWAY = """
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
command = [sys.executable, "-m", "coldstart.host.live.starter", str(theirs.fileno())]
started = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env={**os.environ, sys.argv[1]: str(os.getpid())})
print(started.pid, flush=True)
time.sleep(60)
"""


def _ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_stopped_starter_ends_with_its_gateway() -> None:
    command = [sys.executable, "-c", GATEWAY, str(SUPERVISOR_PID)]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    pid = int(gateway.stdout.readline())
    wait_until(lambda: _ignores(pid, signal.SIGCHLD))  # as it does when it waits for orders
    os.kill(pid, signal.SIGSTOP)
    gateway.kill()
    gateway.wait()
    wait_until(lambda: has_ended(pid))


# Plans a start as a forked supervisor does, and prints the modules that the starter had not imported before the fork.
SUPERVISOR = """
import json, socket, sys
from types import SimpleNamespace
from coldstart.host.live import starter
class Planned(Exception): ...
def launch(*_):
    raise Planned
def serve_forever(channel, run):
    shared = set(sys.modules)
    from coldstart.launch import ladder
    ladder.start_server = launch
    try:
        run(json.loads(sys.argv[1]), SimpleNamespace(send=lambda _: None))
    except Planned:
        print([name for name in sorted(set(sys.modules) - shared) if name.startswith("coldstart")])
starter.serve_forever = serve_forever
starter.main(socket.socketpair()[0].detach())
"""


def _describe_start(tmp_path: Path, **launch: Any) -> dict[str, Any]:
    """Write a model and return the message that orders its start."""
    model, own = write_empty(tmp_path / "model"), str(tmp_path / "own")
    order = StartOrder(Launch("m", str(model), **launch), 1.0, cache=own, templates=own, offline=True)
    return order.encode()


def test_supervisor_finds_the_modules_of_a_start_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, json.dumps(_describe_start(tmp_path, on_miss="warn"))],
        check=False,
        env={**os.environ, SUPERVISOR_PID: str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
