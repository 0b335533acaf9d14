"""Sections that are code, unpacked once per content and reused, but only where this user's trust has allowed it.

A cache root copied from elsewhere may hold directories that nobody here has judged. So each judgement is recorded in the state
directory, which does not travel with the cache, beside the names of the keys that were trusted then; a directory
without a record that stands is judged and unpacked anew. Reading a record costs a start some 50 microseconds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.artifacts.bundle import Bundle, Trust
from coldstart.machine import paths


def unpacked(bundle: Bundle, section: str, root: Path, trust: Trust) -> Path:
    """The directory below `root` that holds `section` of `bundle`.

    Raises what Bundle.extract raises (Untrusted among them), OSError.
    """
    digest = bundle.entry(section).digest.removeprefix("sha256:")
    place, record = root / digest, paths.state_dir() / "unpacked" / digest
    if _stands(record, place):
        return place
    with _lock(record):
        if not _stands(record, place):  # another start may have been faster
            _renew(bundle, section, place, trust)
            record.write_text(_trusted_keys())
    return place


def _stands(record: Path, place: Path) -> bool:
    try:
        return record.read_text() == _trusted_keys() and place.is_dir()
    except FileNotFoundError:
        return False


def _trusted_keys() -> str:
    # The names end in the keys' fingerprints: adding or removing one makes every section be judged again.
    directory = paths.state_dir() / "trust"
    return "\n".join(sorted(os.listdir(directory))) if directory.is_dir() else ""  # noqa: PTH208


def _renew(bundle: Bundle, section: str, place: Path, trust: Trust) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        aside = place.with_name(f".{place.name}.{os.getpid()}.old")
        place.rename(aside)
        shutil.rmtree(aside)
    bundle.extract(section, place, trust=trust)


@contextmanager
def _lock(record: Path) -> Iterator[None]:
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (record.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
