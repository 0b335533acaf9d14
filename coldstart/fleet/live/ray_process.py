"""Ray nodes: their labels, their commands, and a node as a supervised child process.

Run as a program, this module starts a node in the foreground that ends with its parent process (`ray start --block`).
Failures are detected faster than with Ray's defaults: a node counts as dead after about 8 s without a response. Its agent
gets more time to start, because the machine may be busy.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from coldstart.contract import environment
from coldstart.errors import CommandFailedError, UsageError
from coldstart.fleet.specification import ServerSpec
from coldstart.host.live.log import Log
from coldstart.launch.server import end
from coldstart.launch.server_process import ChildServer
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.ipc.peers import await_readable
from coldstart.system.paths import Cache
from coldstart.system.proc.lifeline import die_with_supervisor

_LABEL_PREFIX = "coldstart-"
_LABEL_FIELDS = ("memory", "network", "load", "devices")


def format_labels(server: ServerSpec) -> dict[str, str]:
    """Return the Ray labels that describe a server. Rates are rounded to whole bytes per second."""
    return {_LABEL_PREFIX + member: str(round(getattr(server, member))) for member in _LABEL_FIELDS}


def parse_labels(name: str, given: Mapping[str, str]) -> ServerSpec | None:
    """Return the server that the labels of a node describe, or None if the node is not a server.

    Raises UsageError if a label is missing or is not a number.
    """
    if _LABEL_PREFIX + "memory" not in given:
        return None
    try:
        figures = {member: int(given[_LABEL_PREFIX + member]) for member in _LABEL_FIELDS}
    except (KeyError, ValueError) as error:
        raise UsageError(f"node {name}: invalid server labels: {error}") from error
    return ServerSpec(name, **figures)


# The path of a Unix socket is limited to 107 bytes, and Ray appends a long path to its directory.
_SOCKET = "/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# Ray's session directory has mode 0777, so its parent must be private.
_SESSIONS = "r"
_PREFIX = "coldstart-ray-"
# Memory of the node's object store, which the fleet does not use. Ray's minimum is 75 MB.
OBJECT_STORE_BYTES = 80_000_000
ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's default is 15, and the processes of a server actor inherit it.
    "RAY_worker_niceness": "0",
}


def build_node_command(server: ServerSpec | None, *words: str) -> list[str]:
    """Build the command that starts a node. Its labels describe `server`, which is None for a node that serves no models."""
    shared = [
        "--block",
        "--disable-usage-stats",
        "--num-cpus=1",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]
    # Use any free port. With Ray's fixed range, only one fleet could run on a machine.
    shared += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if server is not None:
        shared.append(
            "--labels=" + ",".join(f"{name}={value}" for name, value in format_labels(server).items())
        )
    return [sys.executable, "-P", "-m", "coldstart.fleet.live.ray_process", "start", *shared, *words]


def build_head_command(server: ServerSpec | None, directory: Path, port: int) -> list[str]:
    """Build the command that starts the head node, whose control service listens on `port`.

    The autoscaler is disabled, because it would expose metrics to the network on a fixed port.
    """
    own = [
        f"--port={port}",
        f"--ray-client-server-port={find_free_port()}",
        f"--temp-dir={directory / _SESSIONS}",
    ]
    return build_node_command(server, "--head", "--include-dashboard=false", "--no-monitor", *own)


def create_private_directory() -> Path:
    """Create a private directory for Ray. It is in /tmp if the default location would make socket paths too long."""
    longest = Path(tempfile.gettempdir(), f"{_PREFIX}12345678{_SOCKET}")
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp" if len(os.fsencode(longest)) > 107 else None))


def require_ray() -> None:
    """Check that Ray is installed, without importing it. Raises UsageError if it is not."""
    if find_spec("ray") is None:
        raise UsageError("a fleet requires Ray, which is not installed", hint="run `coldstart install fleet`")


def main() -> None:
    """Run Ray's command line in this process."""
    die_with_supervisor()
    # On a joining machine Ray creates the parent of its session directory, which must be private too.
    os.umask(0o077)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    from ray.scripts.scripts import main as ray

    sys.argv[0] = "ray"
    ray()


START_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 120.0, 10.0, 0.2
JOIN_TIMEOUT_S, REJOIN_TIMEOUT_S, RESTART_DELAY_S = 90.0, 600.0, 2.0


class RayProcess:
    """Process of one Ray node. If any of its child processes exits, Ray shuts down the whole node."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = ChildServer(process), log

    def has_ended(self) -> bool:
        """Return whether the node has exited."""
        return bool(await_readable(self.process, timeout_s=0))

    def find_error(self) -> str:
        """Return why Ray exited: the last error in its log, or the last line if there is no error."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        return (errors or lines or ["the log of Ray is empty"])[-1]

    def wait(self) -> str:
        """Wait until Ray has started, and return the IP address of the node. Raises CommandFailedError if it does not start."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        over = False
        while not over:
            over = time.monotonic() > deadline_s or self.has_ended()
            text = self.log.read_text(errors="replace")
            if "Ray runtime started" in text:
                # Ray chooses the address itself, even if loopback is requested.
                where = next(line for line in text.splitlines() if "Local node IP:" in line)
                return where.rpartition(":")[2].strip()
            time.sleep(POLL_S)
        raise CommandFailedError(f"Ray did not start on this machine: {self.find_error()}")

    def kill(self) -> None:
        """Kill the node immediately, which also ends the model servers of its actors."""
        if not self.has_ended():
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Stop the node and all its processes, and wait until it has exited."""
        end(self.process, STOP_TIMEOUT_S)


@contextmanager
def _run_node(command: Sequence[str], env: Mapping[str, str], directory: Path) -> Iterator[RayProcess]:
    """Run a node for the duration of the block. It also ends if this process is killed."""
    log = directory / "node.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, str(environment.SUPERVISOR_PID): str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    node = RayProcess(process, log)
    try:
        yield node
    finally:
        node.end()


@dataclass(frozen=True)
class OwnRay:
    """Ray cluster of a fleet: its head node, its address (HOST:PORT), and the environment of its clients."""

    node: RayProcess
    address: str
    env: Mapping[str, str]


@contextmanager
def run_own_ray(server: ServerSpec | None, cache: Cache) -> Iterator[OwnRay]:
    """Run a Ray cluster with its own token during the block. Its head node has the labels that describe `server`, if any.

    Raises CommandFailedError if Ray does not start.
    """
    env = {
        **ENVIRONMENT,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        str(environment.CACHE_DIR): str(cache.root),
    }
    directory, port = create_private_directory(), find_free_port()
    try:
        with _run_node(build_head_command(server, directory, port), env, directory) as node:
            yield OwnRay(node, f"{node.wait()}:{port}", env)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_joined_node(command: Sequence[str], env: Mapping[str, str], log: Log) -> NoReturn:
    """Run a node that joins a cluster until a signal arrives.

    If Ray ends it because it was unreachable for a while, restart it.

    Raises:
        SystemExit: A signal was received, and the node has exited.
        CommandFailedError: The node did not join within JOIN_TIMEOUT_S seconds, or did not rejoin within REJOIN_TIMEOUT_S
            seconds.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))
    since_s, limit_s = time.monotonic(), JOIN_TIMEOUT_S
    while True:
        with (
            tempfile.TemporaryDirectory(prefix="coldstart-join-") as directory,
            _run_node(command, env, Path(directory)) as node,
        ):
            try:
                log.write("joined", address=node.wait())
                node.process.wait()
                since_s, limit_s = time.monotonic(), REJOIN_TIMEOUT_S
                reason = f"the Ray node on this machine exited: {node.find_error()}"
            except CommandFailedError as failed:
                reason = str(failed)
        if time.monotonic() - since_s > limit_s:
            raise CommandFailedError(reason)
        log.write("ray ended", reason=reason, again_s=RESTART_DELAY_S)
        time.sleep(RESTART_DELAY_S)


if __name__ == "__main__":
    main()
