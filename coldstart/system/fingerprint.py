"""Record the files, kernel and processor that a template or a snapshot was created with, and compare them with this machine.

A template or a snapshot runs the code that it was created from, whatever has been installed since. A fix that does not change
a version would never take effect. So both record the content digests of all mapped files and all imported modules, including
a model's own code and coldstart's. They also record the kernel release, the processor's flags and the C library. If one of
them differs, the template or snapshot is rejected with the name of the difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import coldstart
from coldstart.artifacts import canonical
from coldstart.artifacts.files import read_text
from coldstart.system import digests
from coldstart.system.devices import hardware

FORMAT = 2
"""Format 1 had sizes of mapped files and the kernel's series, but no module and no digest."""
MODULES = "modules.json"
LIST = "files.sha256"
ABOUT = "made-of.json"


def imported() -> list[str]:
    """Return the files of all modules that this process has imported."""
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return sorted({str(Path(file)) for file in files if isinstance(file, str) and file.startswith("/")})


def write(pid: int, modules: Path, directory: Path) -> None:
    """Write the fingerprint of process `pid` to `directory`; `modules` is the list of modules that the process wrote.

    Raises:
        OSError: A file of the process does not exist any more.
    """
    files = {*mapped_files(pid), *canonical.read(modules), *_own_code()}
    (directory / LIST).write_text(digests.listing(path for path in files if Path(path).is_file()))
    (directory / ABOUT).write_text(json.dumps({"format": FORMAT, "machine": machine()}))


def obstacle(directory: Path, what: str) -> str | None:
    """Return why the object recorded in `directory` cannot be used here, None if it can; `what` names it in the reason."""
    try:
        about, listed = canonical.read(directory / ABOUT), read_text(directory / LIST)
    except (OSError, ValueError):
        about, listed = {}, ""
    if not isinstance(about, Mapping) or about.get("format") != FORMAT:
        return f"the {what} has no valid fingerprint: an older coldstart created it"
    for name, present in machine().items():
        if (wanted := str(about["machine"].get(name))) != present:
            return f"the {what} was created on {name} {_apart(wanted, present)}, this machine has {_apart(present, wanted)}"
    changed = digests.difference(listed)
    return f"the {what} was created with {changed}" if changed else None


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


def own_code() -> str:
    """Return one digest over coldstart's own code, equal wherever it is installed."""
    listed = digests.cached(_own_code())
    for place in _packages():
        listed = listed.replace(f"{os.path.dirname(place)}/", "")  # noqa: PTH120
    return hashlib.sha256("".join(sorted(listed.splitlines(keepends=True))).encode()).hexdigest()


def _own_code() -> Iterator[str]:
    # All modules, also those that a fork imports later: they must be of the same release as the modules in memory.
    # os.walk is several times faster than Path.rglob for 500 files at every start.
    for place in _packages():
        for folder, _, names in os.walk(place):
            yield from (f"{folder}/{name}" for name in names if name.endswith(".py"))


def _packages() -> tuple[str, ...]:
    from coldstart import artifacts

    return (*coldstart.__path__, *artifacts.__path__)
