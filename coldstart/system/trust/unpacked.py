"""Sections that are code, unpacked once per content and reused, but only where this user's trust has allowed it.

Nothing runs that somebody else could have put there. A directory is used again only while all of this holds: every component of
its path, and every entry below it, belongs to this user or root and is writable by nobody else; it is at the path where it was
unpacked, and what was unpacked still has its inode, mode, size, mtime and ctime; the keys that are trusted, and our own code,
are those it was judged by. The record of that lies in the state directory, which does not travel with a cache. Whatever else is
found is unpacked anew from the bundle, whose bytes and signature are verified; where the place itself is not fit, elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle, Trust
from coldstart.system import fingerprint, paths
from coldstart.system.trust import directory_fingerprint, ownership, section_claims

FORMAT = 2
"""1 was a text: the names of the trusted keys."""
_TRIES = 20


def unpacked(
    bundle: Bundle,
    section: str,
    root: Path,
    trust: Trust,
    refused: list[str] | None = None,
    *,
    exact: bool = False,
) -> Path:
    """The directory that holds `section` of `bundle`: below `root`, or in a private place where others could write to `root`.

    With `exact`, only below `root`. Why a directory that was there is not used is added to `refused`.
    Raises what Bundle.extract raises (Untrusted among them), OSError.
    """
    digest = bundle.entry(section).digest.removeprefix("sha256:")
    place = (root if exact else _fit(root)) / digest
    record = directory_fingerprint.record("unpacked", place)
    with suppress(OSError):  # a state directory that cannot be written costs a later prune its work only
        section_claims.claim(digest, bundle.store.root)
    if (reason := _obstacle(record, place)) is None:
        return place
    with _closed():
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _closed(), files.locked(record.parent / ".lock"):
        if (reason := _obstacle(record, place)) is not None:  # another start may have been faster
            _renew(bundle, section, place, trust)
            record.write_text(json.dumps(_description(place)))
            if reason and refused is not None:
                refused.append(f"unpacked anew: {reason}")
    return place


def _fit(root: Path) -> Path:
    nearest = next(place for place in (root, *root.parents) if place.exists())
    fit = ownership.fault(root) is None and os.access(nearest, os.W_OK | os.X_OK)
    return root if fit else paths.frozen_dir() / "unpacked"


def _obstacle(record: Path, place: Path) -> str | None:
    """Why the directory cannot be used as it is, "" where there is nothing to tell; None where it can be used."""
    try:
        known = json.loads(record.read_text())
    except (FileNotFoundError, ValueError):
        return f"{place} was judged by an older coldstart, or by nobody" if place.is_dir() else ""
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        return f"{place} was judged by an older coldstart"
    if not place.is_dir():
        return ""
    if (reason := ownership.fault(place)) is not None:
        return reason
    if known["keys"] != _trusted_keys():
        return ""
    if known["code"] != fingerprint.own_code():
        return f"{place} was unpacked by another release of coldstart"
    return directory_fingerprint.change(
        known["entries"], place, "unpacked"
    )  # what inductor adds is this user's own


def _description(place: Path) -> dict[str, object]:
    return {
        "format": FORMAT,
        "place": os.path.realpath(place),
        "keys": _trusted_keys(),
        "code": fingerprint.own_code(),
        "entries": directory_fingerprint.of(place),
    }


def _trusted_keys() -> str:
    # The names end in the keys' fingerprints: adding or removing one makes every section be judged again.
    directory = paths.state_dir() / "trust"
    return "\n".join(sorted(os.listdir(directory))) if directory.is_dir() else ""  # noqa: PTH208


def _renew(bundle: Bundle, section: str, place: Path, trust: Trust) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := ownership.fault(place.parent)) is not None:
        raise PermissionError(f"code is not unpacked where others can write: {reason}")
    fresh = place.with_name(f".{place.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        bundle.extract(section, fresh, trust=trust)
        _put(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put(fresh: Path, place: Path) -> None:
    """An engine that was killed with its server may put its compile cache there once more: then again."""
    for left in reversed(range(_TRIES)):
        _away(place)
        try:
            fresh.rename(place)
            return
        except OSError:
            if not left or not place.exists():
                raise


def _away(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()
    elif place.is_dir():
        aside = place.with_name(f".{place.name}.{os.getpid()}.old")
        place.rename(aside)
        shutil.rmtree(aside)


@contextmanager
def _closed() -> Iterator[None]:
    """Whatever is made in the block is its owner's alone, the directories above it included."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)
