"""Time of the last start of each key in each mode on this machine, for the expected time of a next start."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical, files
from coldstart.system.paths import Cache

# Number of keys to remember; the key with the oldest start is dropped first.
_KEYS = 64


def record_start(key: str, mode: str, ready_s: float, cache: Cache) -> None:
    """Store the time of a start in seconds, if the cache is writable."""
    starts = _read(cache)
    own = starts.pop(key, {})
    recent = dict(list(starts.items())[-_KEYS + 1 :])
    recent[key] = {**(own if isinstance(own, dict) else {}), mode: round(ready_s, 3)}
    with suppress(OSError):  # the server is ready, and a full disk must not end it
        _file(cache).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(_file(cache), json.dumps(recent).encode())


def find_last(key: str, mode: str, cache: Cache) -> float | None:
    """Return the seconds of the last start of the key in this mode, None before the first."""
    own = _read(cache).get(key)
    seconds = own.get(mode) if isinstance(own, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return float(seconds) if 0 < seconds < float("inf") else None


def _file(cache: Cache) -> Path:
    return cache.writable / "starts.json"


def _read(cache: Cache) -> dict[str, Any]:
    try:
        starts = canonical.read(_file(cache))
    except (OSError, ValueError, RecursionError):
        return {}
    return starts if isinstance(starts, dict) else {}
