"""What a second user of the machine can try. Each function returns a value if it succeeds; None or OSError is a failure.

`CONTROLS` has, for each of them, a target that its owner has opened or that belongs to the second user: there it must succeed,
so an attack that fails has failed because of the target.
"""

import ctypes
import fcntl
import http.client
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

Attempt = Callable[[Any], object]
Act = Callable[[Callable[[], object]], object]
MARKER = b"of another user"
_LIBC = ctypes.CDLL(None, use_errno=True)
_ATTACH, _DETACH = 16, 17


@dataclass(frozen=True)
class Attack:
    """`attempt` against `target`, described by `name`."""

    name: str
    attempt: Attempt
    target: Any


def read(path: Path) -> object:
    """Read a file."""
    with path.open("rb") as file:
        return len(file.read(1 << 16)) or None


def list_names(directory: Path) -> object:
    """List a directory."""
    return len(os.listdir(directory)) + 1  # noqa: PTH208


def overwrite(path: Path) -> object:
    """Write into a file."""
    with path.open("r+b") as file:
        return file.write(MARKER)


def replace(path: Path) -> object:
    """Move a file or directory away, so that another one can take its name."""
    path.rename(path.with_name("stolen"))
    return str(path)


def plant(directory: Path) -> object:
    """Create a file in a directory."""
    return (directory / "planted.py").write_bytes(MARKER)


def link(directory: Path) -> object:
    """Create a symbolic link in a directory, through which its owner would write elsewhere."""
    (directory / "link").symlink_to("/etc/passwd")
    return str(directory)


def hold(path: Path) -> object:
    """Take a lock, so that its owner waits forever."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "held"


def connect(path: Path) -> object:
    """Connect to a unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return "connected"


def end(pid: int) -> object:
    """Send a signal that would end the process."""
    os.kill(pid, signal.SIGTERM)
    return "sent"


def read_environment(pid: int) -> object:
    """Read the environment of a process."""
    return read(Path(f"/proc/{pid}/environ"))


def read_memory(pid: int) -> object:
    """Read the memory of a process."""
    first = Path(f"/proc/{pid}/maps").read_text().partition("-")[0]
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        memory.seek(int(first, 16))
        return len(memory.read(16))


def list_files(pid: int) -> object:
    """List the open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")) or None  # noqa: PTH208


def steal_file(pid: int) -> object:
    """Duplicate a descriptor of a process."""
    handle = os.pidfd_open(pid)
    taken = _LIBC.syscall(438, handle, 1, 0)
    return None if taken < 0 else "taken"


def trace(pid: int) -> object:
    """Attach a debugger to a process."""
    if _LIBC.ptrace(_ATTACH, pid, None, None):
        return None
    os.waitpid(pid, 0x40000000)
    _LIBC.ptrace(_DETACH, pid, None, None)
    return "attached"


def ask(request: str) -> object:
    """Send `METHOD URL` without a key; a key is required if the status is 401 or 403."""
    method, url = request.split()
    place = urlsplit(url)
    client = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
    body = b'{"model": "m", "prompt": "x"}' if method == "POST" else None
    client.request(method, place.path, body, {"content-type": "application/json"})
    status = client.getresponse().status
    return None if status in (401, 403) else status


PROCESS: tuple[Attempt, ...] = (read_environment, read_memory, list_files, steal_file, trace, end)
"""Every attack on one process; the last would end it."""
CONTROLS: dict[Attempt, Callable[[Path, int, str], Any]] = {
    **dict.fromkeys((read, overwrite, hold), lambda place, pid, url: place / "file"),
    **dict.fromkeys((list_names, plant, link), lambda place, pid, url: place),
    replace: lambda place, pid, url: place / "movable",
    connect: lambda place, pid, url: place / "socket",
    ask: lambda place, pid, url: f"GET {url}/",
    **dict.fromkeys(PROCESS, lambda place, pid, url: pid),
}
"""From an open directory, a process of the second user and an address without a key: the target of each function."""


def won(stranger: Act, attacks: list[Attack]) -> dict[str, object]:
    """Make all attacks; return what those that succeeded found, by name."""
    assert len({one.name for one in attacks}) == len(attacks)
    tried = {one.name: stranger(lambda one=one: one.attempt(one.target)) for one in attacks}  # type: ignore[misc]
    return {name: found for name, found in tried.items() if found is not None}


def attack_process(role: str, pid: int) -> list[Attack]:
    """Return every attack on the process `pid`."""
    return [Attack(f"{one.__name__} {role}", one, pid) for one in PROCESS]


def listening(pids: set[int]) -> set[tuple[int, int]]:
    """Return the TCP ports on which processes listen, each as (PID, port)."""
    sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {(one.pid, one.laddr.port) for one in sockets if one.pid in pids}
