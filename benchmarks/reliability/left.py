"""What starts leave behind: processes, descriptors, shared memory, files and sockets."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.reliability.run import Run

# What every server's and template's directory is called anew, and the sockets in it: as many as before are not more.
_RANDOM = re.compile(r"(?<=/server-)\w{8}|(?<=/tmp-)\w{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def there(run: Run) -> dict[str, Any]:
    """What could be left: processes, the template's descriptors, shared memory, files and sockets anywhere."""
    processes, descriptors = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if int(place.name) in (1, os.getpid(), os.getppid()) or not words[0]:
                continue  # the first process of the namespace reaps what nobody else does
            named = b" ".join(words[2:4]).decode(errors="replace") or place.name
            processes[int(place.name)] = named
            descriptors[int(place.name)] = len(list((place / "fd").iterdir()))
    places = (Path("/tmp"), Path("/var/tmp"), run.machine.root)
    apart = (run.machine.root / "served", run.machine.root / "said")
    files = [
        _RANDOM.sub("*", str(path))
        for place in places
        for path in place.rglob("*")
        if not path.is_relative_to(apart[0]) and path != apart[1] and "__pycache__" not in path.parts
    ]
    return {
        "processes": sorted(processes.values()),
        "descriptors": sum(descriptors.values()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "files": files,
    }


def settled(run: Run, before: dict[str, Any]) -> dict[str, Any]:
    """As `there`, once what is ending has ended."""
    deadline = time.monotonic() + 15
    while True:
        now = there(run)
        if more(before, now) is None or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def more(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What there is now that there was not."""
    for name in ("processes", "shared memory"):
        if more := Counter(now[name]) - Counter(before.get(name, [])):
            return f"{name}: {dict(more)}"
    if more := Counter(now["files"]) - Counter(before.get("files", [])):
        return f"files: {sorted(more.elements())[:8]}"
    if now["descriptors"] > before.get("descriptors", 0):
        return f"descriptors: {before.get('descriptors')} became {now['descriptors']}"
    return None
