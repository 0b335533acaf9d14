"""Ray node in the foreground that ends with its parent process: runs `ray start --block`.

Failure detection is faster than Ray's default: a node that does not answer is dead after about 8 s. Its agent has more
time to start on a busy machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.fleet.specification import ServerSpec
from coldstart.system.ipc.addresses import free_port
from coldstart.system.proc.lifeline import die_with_supervisor

_LABEL_PREFIX = "coldstart-"
_MEMBERS = ("memory", "network", "load", "devices")


def labels(server: ServerSpec) -> dict[str, str]:
    """Return the labels of a server; rates in whole bytes/s."""
    return {_label(member): str(round(getattr(server, member))) for member in _MEMBERS}


def server(name: str, given: Mapping[str, str]) -> ServerSpec | None:
    """Return the server that a node's labels describe, or None if the node is not a server.

    Raises:
        UsageError: The labels are incomplete or not numbers.
    """
    if _label("memory") not in given:
        return None
    try:
        figures = {member: int(given[_label(member)]) for member in _MEMBERS}
    except (KeyError, ValueError) as error:
        raise UsageError(f"node {name}: invalid server labels: {error}") from error
    return ServerSpec(name, **figures)


def _label(member: str) -> str:
    return _LABEL_PREFIX + member.replace("_", "-")


# The path of a unix socket is limited to 107 bytes, and Ray's sockets lie deep below its directory.
_SOCKET = "/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# Ray gives its directory of sessions mode 0777, so it lies below one that no other user can enter.
_SESSIONS = "r"
_PREFIX = "coldstart-ray-"
# Memory of the node's object store, which the fleet does not use. Ray's minimum is 75 MB.
OBJECTS = 80_000_000
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


def command(server: ServerSpec | None, *words: str) -> list[str]:
    """Return the command that starts a node; `server` sets its labels, None for a node that serves no model."""
    shared = ["--block", "--disable-usage-stats", "--num-cpus=1", f"--object-store-memory={OBJECTS}"]
    # Any free port: with Ray's fixed range only one fleet could run on a machine.
    shared += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if server is not None:
        shared.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels(server).items()))
    return [sys.executable, "-P", "-m", "coldstart.fleet.live.ray_node", "start", *shared, *words]


def head(server: ServerSpec | None, directory: Path, port: int) -> list[str]:
    """Return the command of the first node, whose control service listens at `port`.

    It has no autoscaler, which would show its metrics to every network at a fixed port.
    """
    own = [f"--port={port}", f"--ray-client-server-port={free_port()}", f"--temp-dir={directory / _SESSIONS}"]
    return command(server, "--head", "--include-dashboard=false", "--no-monitor", *own)


def joining(server: ServerSpec, address: str) -> list[str]:
    """Return the command of another node."""
    return command(server, f"--address={address}")


def own_directory() -> Path:
    """Create a private directory for a fleet's own Ray, below /tmp if the path of a temporary directory is too long."""
    longest = Path(tempfile.gettempdir(), f"{_PREFIX}12345678{_SOCKET}")
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp" if len(os.fsencode(longest)) > 107 else None))


def require() -> None:
    """Raise UsageError if Ray is not installed; does not import it."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError("a fleet runs on Ray, which is not installed", hint="coldstart install fleet")


def main() -> None:
    """Run the `ray` command line."""
    die_with_supervisor()
    # On a machine that joins, Ray creates the directory above its sessions: no other user may enter it either.
    os.umask(0o077)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    from ray.scripts.scripts import main as ray

    sys.argv[0] = "ray"
    ray()


if __name__ == "__main__":
    main()
