"""Content digests of many files, computed again only for files whose stat(2) has changed.

A list of digests is text in the format of sha256sum(1). The state directory records which lists were verified, by a digest over
(path, device, inode, size, mtime, ctime) of every file. A process cannot set ctime, so a file with other bytes has another
ctime. A file that changes within the clock's resolution of a read could keep its ctime, so files younger than RACY_S are
not recorded (as in git's index).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from coldstart.artifacts.files import make_private, open_regular, read_text, replacing
from coldstart.system import paths
from coldstart.system.dry_run import is_dry_run
from coldstart.system.file_state import RACY_S

_MARK = "  "
_T = TypeVar("_T")


def listing(files: Iterable[str]) -> str:
    """Return one line "<sha256>  <path>" for each file, sorted by path. Raises OSError for a file that cannot be read."""
    chosen = sorted(set(files))
    digests = _side_by_side(_sha256, chosen)
    return "".join(f"{digest}{_MARK}{path}\n" for digest, path in zip(digests, chosen, strict=True))


def cached(files: Iterable[str]) -> str:
    """Return `listing`, cached by the stats of its files. Use it for a few hundred files that every start needs."""
    chosen = sorted(set(files))
    return _compute_once("list-", "\n".join(chosen), chosen, lambda: listing(chosen))


def difference(listed: str) -> str | None:
    """Return the first file that differs from the list, with the expected and the actual digest; None if all match."""
    lines = listed.splitlines()
    files = [line[64 + len(_MARK) :] for line in lines]

    def compare() -> str:
        for line, path, digest in zip(lines, files, _side_by_side(_sha256_or_none, files), strict=True):
            if digest != line[:64]:
                return f"{path} (sha256 {line[:12]}), found {'nothing' if digest is None else digest[:12]}"
        return ""

    return _compute_once("", listed, files, compare) or None


def _compute_once(kind: str, asked: str, files: Sequence[str], compute: Callable[[], str]) -> str:
    """Return the result of `compute` for `asked`, or the recorded one if no file has changed since."""
    name = hashlib.sha256(asked.encode(errors="surrogateescape")).hexdigest()
    record, stamp = paths.state_dir() / "compared" / f"{kind}{name}", _stamp(files)
    mark, _, known = (_read(record) or "").partition("\n")
    if stamp is not None and mark == stamp[0]:
        return known
    result = compute()
    if stamp is not None and stamp == _stamp(files) and time.time() - stamp[1] > RACY_S:
        _write(record, f"{stamp[0]}\n{result}")
    return result


def _stamp(files: Sequence[str]) -> tuple[str, float] | None:
    """Return (digest over every file's stat, youngest ctime in seconds), None if a file is missing."""
    lines, youngest = [], 0
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116 - thousands of them at every start
        except OSError:
            return None
        youngest = max(youngest, status.st_ctime_ns)
        lines.append(
            f"{path} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        )
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest(), youngest / 1e9


def _write(record: Path, text: str) -> None:
    if is_dry_run():
        return
    with suppress(OSError):  # a read-only home directory compares at every start
        make_private(record.parent)
        with replacing(record, durable=False) as file:
            file.write(text.encode(errors="surrogateescape"))


def _read(record: Path) -> str | None:
    try:
        return read_text(record)
    except (OSError, ValueError):
        return None


def _side_by_side(digest: Callable[[str], _T], files: Sequence[str]) -> list[_T]:
    # Imported here because a start whose files are unchanged computes no digest.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest, files))


def _sha256(path: str) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_or_none(path: str) -> str | None:
    try:
        return _sha256(path)
    except OSError:
        return None
