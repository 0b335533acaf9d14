"""Record which files, kernel and processor a template or snapshot was created with, and compare them with this machine.

A template or snapshot runs the code it was created from, even after an installation has changed. Without a check, a fix
that keeps the version number would not reach it. So both record the state (stat(2)) of mapped files and imported modules,
including the model's own code and coldstart's, and the kernel release, the processor flags and the C library. If any of
them differs, the template or snapshot is rejected, and the error names the difference.

Both are used only on the machine that created them, so a file with the recorded times is not read: a process can set
neither ctime nor the clock of the file system. A file with other times is compared by its digest, because ctime also
changes when uv links the file into another environment, which leaves the code the same. Of a library larger than
LARGE_BYTES, only the beginning, which contains its build ID, is hashed, and its mtime must not differ: CUDA libraries
have gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import coldstart
from coldstart.artifacts import canonical
from coldstart.artifacts.files import read_regular
from coldstart.system.devices import hardware
from coldstart.system.file_state import find_state

MODULES = "modules.json"
ABOUT = "made-of.json"
LARGE_BYTES = 8 << 20
"""Size in bytes of the part of a file that is hashed."""


class Fingerprint(msgspec.Struct):
    """Machine properties, and the size, mtime, ctime and SHA-256 digest (of the beginning) of each file by path.

    The inode is omitted, because an overlay file system may change it.
    """

    machine: dict[str, str]
    files: dict[str, tuple[int, int, int, str]]


def list_imported_files() -> list[str]:
    """Return the files of all modules that this process has imported."""
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return sorted({str(Path(file)) for file in files if isinstance(file, str) and file.startswith("/")})


def write_fingerprint(pid: int, modules: Path, directory: Path) -> None:
    """Write the fingerprint of process `pid` to `directory`. `modules` is the file in which that process listed its modules.

    Raises:
        OSError: A file of the process no longer exists.
    """
    files = {*list_mapped_files(pid), *canonical.read_json(modules), *_list_own_code()}
    (directory / ABOUT).write_bytes(
        msgspec.json.encode(Fingerprint(read_machine_properties(), read_states(files)))
    )


def read_states(files: Iterable[str]) -> dict[str, tuple[int, int, int, str]]:
    """Return the size in bytes, mtime and ctime in nanoseconds, and digest of each file in `files` that exists."""
    states = {path: state[:3] for path in sorted(files) if (state := find_state(path)) is not None}
    return {path: (*states[path], digest) for path, digest in _hash_files(states)}


def _hash_files(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each file with the SHA-256 digest of its first LARGE_BYTES, or with an empty string if it cannot be read."""

    def hash_file(path: str) -> tuple[str, str]:
        try:
            with Path(path).open("rb") as file:
                return path, hashlib.sha256(file.read(LARGE_BYTES)).hexdigest()
        except OSError:
            return path, ""

    # hashlib releases the GIL while it computes.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(hash_file, files)


def find_mismatch(directory: Path, subject: str) -> str | None:
    """Return why the template or snapshot in `directory` does not fit this machine, or None. The text names it `subject`."""
    try:
        recorded = msgspec.json.decode(read_regular(directory / ABOUT), type=Fingerprint)
    except (OSError, ValueError, msgspec.MsgspecError):
        return f"the {subject} has no valid fingerprint"
    for name, present in read_machine_properties().items():
        if (wanted := str(recorded.machine.get(name))) != present:
            created_on, here = _find_extra_words(wanted, present), _find_extra_words(present, wanted)
            return f"the {subject} was created on {name} {created_on}, but this machine has {here}"
    touched = []
    for path, (size, modified_ns, changed_ns, _) in recorded.files.items():
        found = find_state(path)
        if found is None or found.size != size or (size > LARGE_BYTES and found.modified_ns != modified_ns):
            change = "was removed" if found is None else "has changed"
            return f"{path} {change} since the {subject} was created"
        if (found.modified_ns, found.changed_ns) != (modified_ns, changed_ns):
            touched.append(path)
    for path, digest in _hash_files(touched):
        if not digest or digest != recorded.files[path][-1]:
            return f"{path} has changed since the {subject} was created"
    return None


def read_machine_properties() -> dict[str, str]:
    """Return the machine properties that are not in any file: kernel release, processor flags and C library."""
    return {
        "kernel": platform.release(),
        "processor": hardware.read_cpu_flags(),
        "libc": " ".join(platform.libc_ver()),
    }


def _find_extra_words(one: str, other: str) -> str:
    return " ".join(sorted({*one.split()} - {*other.split()})) or "without"


def list_mapped_files(pid: int) -> list[str]:
    """Return the regular files that process `pid` has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.startswith("/") and Path(path).is_file())


def _list_own_code() -> Iterator[str]:
    # All modules, even those that a fork imports later, must be from the same release as the modules in memory.
    # os.walk is several times faster than Path.rglob for 500 files at every start.
    from coldstart import artifacts

    for place in (*coldstart.__path__, *artifacts.__path__):
        for folder, _, names in os.walk(place):
            yield from (f"{folder}/{name}" for name in names if name.endswith(".py"))
