"""Address and admin key of this user's fleet, which `fleet up` saves for later commands. Only this user can read the file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from coldstart.artifacts import canonical, files
from coldstart.errors import CommandFailedError
from coldstart.system import paths


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """URL, admin key and PID of a fleet's gateway, and the address of Ray, with its token if `fleet up` started Ray."""

    url: str
    admin_key: str
    pid: int
    ray: str
    token: str


def _path() -> Path:
    return paths.runtime_dir() / "fleet.json"


def write_fleet(fleet: LocalFleet) -> None:
    """Save the address and admin key of a fleet, replacing a fleet that was saved before."""
    files.write_atomic(_path(), json.dumps(asdict(fleet)).encode(), mode=0o600)


def remove_fleet() -> None:
    """Remove the saved fleet if this process saved it."""
    known = read_fleet()
    if known is not None and known.pid == os.getpid():
        _path().unlink(missing_ok=True)


def read_fleet() -> LocalFleet | None:
    """Return the saved fleet, or None if there is none."""
    try:
        return LocalFleet(**canonical.read_json(_path()))
    except (OSError, ValueError, TypeError):
        return None


def require_fleet() -> LocalFleet:
    """Return the saved fleet. Raises CommandFailedError if no fleet is saved."""
    found = read_fleet()
    if found is None:
        raise CommandFailedError(
            "no fleet of this user is running on this machine", hint="run `coldstart fleet up --memory 60GiB`"
        )
    return found
