"""What a kept process was made of, and whether that is still what lies on this machine.

A template or a snapshot runs the code it was made from, whatever has been installed since: a fix of ours or of vLLM's that
changes no version would never take effect. So both carry the content digests of every file that they have mapped, of every
module that they have imported (a model's own code and our code among them), and the kernel, the processor's flags and the C
library. One byte that differs, and they are refused with the file's name.
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
from coldstart.system import digests
from coldstart.system.devices import hardware

FORMAT = 2
"""1 knew sizes of mapped files and the kernel's series, no module, and no digest."""
MODULES = "modules.json"
LIST = "files.sha256"
ABOUT = "made-of.json"


def imported() -> list[str]:
    """The files of every module that this process has imported."""
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return sorted({str(Path(file)) for file in files if isinstance(file, str) and file.startswith("/")})


def write(pid: int, modules: Path, directory: Path) -> None:
    """Write what process `pid` was made of into the directory `directory`; `modules` is what it said of itself.

    Raises OSError when a file of it is gone already.
    """
    files = {*mapped_files(pid), *json.loads(modules.read_text()), *_own_code()}
    (directory / LIST).write_text(digests.listing(path for path in files if Path(path).is_file()))
    (directory / ABOUT).write_text(json.dumps({"format": FORMAT, "machine": machine()}))


def obstacle(directory: Path, what: str) -> str | None:
    """Why what was made as `directory` says cannot be used here now, None where it can; the reason calls it `what`."""
    try:
        about, listed = json.loads((directory / ABOUT).read_text()), (directory / LIST).read_text()
    except (OSError, ValueError):
        about, listed = {}, ""
    if not isinstance(about, Mapping) or about.get("format") != FORMAT:
        return f"the {what} does not say what it was made of: it was made by an older coldstart"
    for name, present in machine().items():
        if (wanted := str(about["machine"].get(name))) != present:
            return (
                f"the {what} was taken on {name} {_apart(wanted, present)}, this is {_apart(present, wanted)}"
            )
    changed = digests.difference(listed)
    return f"the {what} was made with {changed}" if changed else None


def machine() -> dict[str, str]:
    """What no file says: the kernel's release, the processor's flags, the C library."""
    return {
        "kernel": platform.release(),
        "processor": hardware.flags(),
        "libc": " ".join(platform.libc_ver()),
    }


def _apart(one: str, other: str) -> str:
    """Of two lists of words, those that only the first has; of anything else the whole."""
    return " ".join(sorted({*one.split()} - {*other.split()})) or "without"


def mapped_files(pid: int) -> list[str]:
    """The regular files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.startswith("/") and Path(path).is_file())


def own_code() -> str:
    """One digest over our own code."""
    return hashlib.sha256(digests.cached(_own_code()).encode()).hexdigest()


def _own_code() -> Iterator[str]:
    # All of it: what a fork imports later would be of another release than what it has in memory.
    from coldstart import artifacts

    # os.walk: half a thousand files at every start, and Path.rglob takes several times as long.
    for place in (*coldstart.__path__, *artifacts.__path__):
        for folder, _, names in os.walk(place):
            yield from (f"{folder}/{name}" for name in names if name.endswith(".py"))
