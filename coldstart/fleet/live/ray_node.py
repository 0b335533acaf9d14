"""A node of Ray in the foreground, which ends with whoever started it: `ray start --block` as Ray itself has it.

Failure detection is quicker than Ray's own (a node that does not answer is dead after some 8 s), and its agent has longer to
come up, for a busy machine's sake.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.fleet.labels import labels
from coldstart.fleet.specification import ServerSpec
from coldstart.system.ipc.addresses import free_port
from coldstart.system.proc.lifeline import die_with_supervisor

# A unix socket's path may have 107 bytes, and Ray's lie deep below its directory.
_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_PREFIX = "coldstart-ray-"
# The node's own memory for objects, of which the fleet has none. Ray's least is 75 MB.
OBJECTS = 80_000_000
ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's own is 15, and whatever a server actor starts inherits it.
    "RAY_worker_niceness": "0",
}


def command(server: ServerSpec | None, *words: str) -> list[str]:
    """The node's command; `server` is what it can, None for one that serves nothing."""
    shared = ["--block", "--disable-usage-stats", "--num-cpus=1", f"--object-store-memory={OBJECTS}"]
    # From any port that is free: Ray's fixed range would keep a second fleet off the machine.
    shared += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if server is not None:
        shared.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels(server).items()))
    return [sys.executable, "-P", "-m", "coldstart.fleet.live.ray_node", "start", *shared, *words]


def head(server: ServerSpec | None, directory: Path, port: int) -> list[str]:
    """The first node, whose control service listens at `port`."""
    own = [f"--port={port}", f"--ray-client-server-port={free_port()}", f"--temp-dir={directory}"]
    return command(server, "--head", "--include-dashboard=false", *own)


def joining(server: ServerSpec, address: str) -> list[str]:
    """Another node."""
    return command(server, f"--address={address}")


def own_directory() -> Path:
    """A new private directory for a Ray of its own: where temporary files go, or below /tmp where that is too long."""
    longest = Path(tempfile.gettempdir(), f"{_PREFIX}12345678{_SOCKET}")
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp" if len(os.fsencode(longest)) > 107 else None))


def require() -> None:
    """Raises UsageError where Ray is not installed; it is not imported."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError("a fleet runs on Ray, which is not installed", hint="coldstart install fleet")


def main() -> None:
    """As `ray`."""
    die_with_supervisor()
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    from ray.scripts.scripts import main as ray

    sys.argv[0] = "ray"
    ray()


if __name__ == "__main__":
    main()
