"""Where this user's fleet is: what `fleet up` leaves for the commands that follow, readable by nobody else."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import CommandFailed
from coldstart.machine import paths


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """The gateway's address and the key of those who run it; Ray's address, and its token where it is ours."""

    url: str
    admin_key: str
    pid: int
    ray: str
    token: str


def _path() -> Path:
    return paths.runtime_dir() / "fleet.json"


def leave(place: FleetPlace) -> None:
    """The last fleet that came up is the one that is meant."""
    files.write_atomic(_path(), json.dumps(asdict(place)).encode(), mode=0o600)


def gone() -> None:
    """Ours is no more."""
    known = look()
    if known is not None and known.pid == os.getpid():
        _path().unlink(missing_ok=True)


def look() -> FleetPlace | None:
    """None where none is known."""
    try:
        return FleetPlace(**json.loads(_path().read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def find() -> FleetPlace:
    """Raises CommandFailed where none is known."""
    found = look()
    if found is None:
        raise CommandFailed(
            "No fleet of yours runs on this machine.", mend="coldstart fleet up --memory 60GiB"
        )
    return found
