"""Unpack code sections once per content, and reuse a directory only if no other user can have changed it.

A directory is reused only while all of these hold:

- Every component of its path and every entry below it belongs to this user or root, and no other user can write to it.
- It is at the path where it was unpacked, and each unpacked file has its inode, mode, size, mtime and ctime.
- The trusted keys and coldstart's version are those that it was verified with.

The record is in the state directory, which does not move with a cache. Any other directory is unpacked again from the
bundle, whose bytes and signature are verified. If the location is not safe, a private one is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.artifacts import files, ownership
from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.artifacts.errors import DestinationExistsError
from coldstart.system import file_state, paths, runtime
from coldstart.system.dry_run import is_dry_run

_TRIES, _KIND = 20, "unpacked"
DISTRIBUTION = "coldstart-vllm"


def unpack_section(
    bundle: Bundle,
    section: str,
    root: Path,
    trust: TrustCheck,
    refused: list[str] | None = None,
) -> Path:
    """Return a directory with `section` of `bundle`, below `root` or, if other users could write there, in a private location.

    In a dry run, the section is not unpacked.

    Args:
        bundle: The bundle.
        section: Name of a section that contains code.
        root: Parent of unpacked directories.
        trust: Check whether the bundle may provide code.
        refused: Receives the reason why an existing directory was not reused.

    Raises:
        BundleError: The section cannot be extracted, or the bundle is not trusted (UntrustedError).
        OSError: The directory cannot be created.
    """
    digest = bundle.find_readable_section(section).digest.removeprefix("sha256:")
    place = paths.choose_writable(root, "unpacked") / digest
    if _explain_not_reusable(place) is None:
        return place
    if is_dry_run():
        bundle.require_trust(section, trust)
        return place
    lock = file_state.locate_record(_KIND, place).with_name(".lock")
    files.create_private_directory(lock.parent)
    with _restrict_umask(), files.hold_lock(lock):
        if (reason := _explain_not_reusable(place)) is not None:  # another start may have unpacked it
            _unpack_again(bundle, section, place, trust)
            file_state.record_directory(_KIND, place, _describe_creator())
            if reason and refused is not None:
                refused.append(f"the code of the bundle was unpacked again: {reason}")
    return place


def _explain_not_reusable(place: Path) -> str | None:
    """Return why the directory cannot be reused, "" if it does not exist, or None if it can be reused."""
    if not place.is_dir():
        return ""
    if (reason := ownership.describe_path_exposure(place)) is not None:
        return reason
    if not (entries := file_state.read_record(_KIND, place, _describe_creator())):
        return f"{place} has no record of its verification with these keys and this version of coldstart"
    return file_state.find_change(entries, place, "unpacked")  # inductor adds files of this user


def _describe_creator() -> str:
    # The file names end in the keys' fingerprints, so each section is verified again when a key is added or removed.
    directory = paths.state_dir() / "trust"
    keys = sorted(os.listdir(directory)) if directory.is_dir() else []  # noqa: PTH208
    return "\n".join([f"release {runtime.find_installed_version(DISTRIBUTION)}", *keys])


def _unpack_again(bundle: Bundle, section: str, place: Path, trust: TrustCheck) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := ownership.describe_path_exposure(place.parent)) is not None:
        raise PermissionError(f"refusing to unpack code where other users can change files: {reason}")
    for left in reversed(range(_TRIES)):
        _remove_existing(place)
        try:
            bundle.extract_section(section, place, trust=trust)
            return
        except (OSError, DestinationExistsError):
            # The engine of a killed server may write its compile cache there meanwhile.
            if not left or not place.exists():
                raise


def _remove_existing(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()
    elif place.is_dir():
        aside = place.with_name(f".{place.name}.{os.getpid()}.old")
        place.rename(aside)
        shutil.rmtree(aside)


@contextmanager
def _restrict_umask() -> Iterator[None]:
    """Make all files and directories that are created in the block accessible to their owner only."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)
