"""Record the files, kernel and processor that a template or a snapshot was created with, and compare them with this machine.

A template or a snapshot runs the code that it was created from, whatever has been installed since. A fix that does not change
a version would never take effect. So both record the state (stat(2)) of all mapped files and all imported modules, including
a model's own code and coldstart's. They also record the kernel release, the processor's flags and the C library. If one of
them differs, the template or snapshot is rejected with the name of the difference. Both are used only on the machine that
created them, so no content is read: a process can set neither ctime nor the clock of the file system.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

import coldstart
from coldstart.artifacts import canonical
from coldstart.artifacts.files import read_regular
from coldstart.system.devices import hardware
from coldstart.system.file_state import find_state

MODULES = "modules.json"
ABOUT = "made-of.json"


class Fingerprint(msgspec.Struct):
    """Properties of the machine, and size, mtime and ctime of each file by its path.

    The inode is no part of it, because an overlay file system may change it.
    """

    machine: dict[str, str]
    files: dict[str, tuple[int, int, int]]


def imported() -> list[str]:
    """Return the files of all modules that this process has imported."""
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return sorted({str(Path(file)) for file in files if isinstance(file, str) and file.startswith("/")})


def write(pid: int, modules: Path, directory: Path) -> None:
    """Write the fingerprint of process `pid` to `directory`; `modules` is the list of modules that the process wrote.

    Raises:
        OSError: A file of the process does not exist any more.
    """
    files = {*mapped_files(pid), *canonical.read_json(modules), *_own_code()}
    (directory / ABOUT).write_bytes(msgspec.json.encode(Fingerprint(machine(), read_states(files))))


def read_states(files: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Return size, mtime and ctime (in nanoseconds) of those files that exist."""
    return {path: state[:3] for path in sorted(files) if (state := find_state(path)) is not None}


def obstacle(directory: Path, what: str) -> str | None:
    """Return why the object recorded in `directory` cannot be used here, None if it can; `what` names it in the reason."""
    try:
        recorded = msgspec.json.decode(read_regular(directory / ABOUT), type=Fingerprint)
    except (OSError, ValueError, msgspec.MsgspecError):
        return f"the {what} has no valid fingerprint"
    for name, present in machine().items():
        if (wanted := str(recorded.machine.get(name))) != present:
            return f"the {what} was created on {name} {_apart(wanted, present)}, this machine has {_apart(present, wanted)}"
    for path, state in recorded.files.items():
        if (found := find_state(path)) is None or found[:3] != state:
            change = "was removed" if found is None else "has changed"
            return f"{path} {change} since the {what} was created"
    return None


def machine() -> dict[str, str]:
    """Return the properties that no file contains: kernel release, processor flags, C library."""
    return {
        "kernel": platform.release(),
        "processor": hardware.flags(),
        "libc": " ".join(platform.libc_ver()),
    }


def _apart(one: str, other: str) -> str:
    """Return the words that only `one` contains."""
    return " ".join(sorted({*one.split()} - {*other.split()})) or "without"


def mapped_files(pid: int) -> list[str]:
    """Return the regular files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.startswith("/") and Path(path).is_file())


def _own_code() -> Iterator[str]:
    # All modules, also those that a fork imports later: they must be of the same release as the modules in memory.
    # os.walk is several times faster than Path.rglob for 500 files at every start.
    from coldstart import artifacts

    for place in (*coldstart.__path__, *artifacts.__path__):
        for folder, _, names in os.walk(place):
            yield from (f"{folder}/{name}" for name in names if name.endswith(".py"))
