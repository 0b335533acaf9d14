"""Arenas: copies of model weights in host memory, within a limit that all processes of a user share.

An arena is a memfd, which the kernel frees when its process dies. A record file identifies the process and the descriptor,
so that another process can evict the arena: it empties the memfd while the owner is not using it. This module does not copy
weights; `backend` does.

Invariant: an arena is emptied only under its exclusive lock, and is read or written only under its shared lock and while
its record exists.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from coldstart.artifacts.files import hold_lock
from coldstart.contract.environment import SLEEP_MEMORY_BYTES
from coldstart.system.paths import runtime_dir
from coldstart.system.proc import processes
from coldstart.system.proc.mappings import map_memory, unmap_memory
from coldstart.units import format_memory

LOCK = "lock"


class ArenaSpaceError(Exception):
    """Error for model weights that do not fit into the memory limit of the arenas."""


def _do_nothing() -> None:
    """Replace a release function that was already called."""


def hash_tensor(tensor: Any) -> str:
    """Return the SHA-256 digest of a CPU tensor's data type, shape and bytes."""
    import torch

    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class _Record:
    """Process and descriptors of an arena. `reason` is set when the arena is evicted."""

    pid: int
    born: str
    token: str
    descriptor: int
    notice: int
    size: int
    model: str
    reason: str = ""

    def open(self) -> int | None:
        """Return a new descriptor of the memfd, or None if its process has closed it."""
        with suppress(OSError):
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            # The process may have reused the descriptor number for another file.
            if f"memfd:coldstart-sleep-{self.token}" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                return descriptor
            os.close(descriptor)
        return None

    def notify(self) -> None:
        """Make the owner release the memory that it has pinned."""
        with suppress(OSError):
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.notice}", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)


class Arena:
    """Host memory of `size` bytes for the weights of one model, at `address` in this process.

    Raises:
        OSError: The kernel has no memory or no file descriptor left.
    """

    def __init__(self, directory: Path, model: str, size: int) -> None:
        token = secrets.token_hex(8)
        self._release: Callable[[], None] | None = None
        self._releasing = Lock()
        self.size, self._directory = size, directory
        self._record = directory / f"{os.getpid()}-{token}.json"
        opened = [os.memfd_create(f"coldstart-sleep-{token}", os.MFD_CLOEXEC)]
        try:
            # If the kernel could not provide the memory later, a write to it would end the process.
            os.posix_fallocate(opened[0], 0, size)
            opened += os.pipe2(os.O_CLOEXEC)
            self._descriptor, self._noticed, self._notice = opened
            born = processes.read_identity(os.getpid()) or ""
            record = _Record(os.getpid(), born, token, self._descriptor, self._notice, size, model)
            self.address = map_memory(size, self._descriptor)
            try:
                self._record.write_text(json.dumps(asdict(record)))
                _set_used_now(self._record)
            except OSError:
                unmap_memory(self.address, size)
                raise
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise

    @contextmanager
    def protect(self) -> Iterator[str | None]:
        """Protect the arena from eviction during the `with` block. Yield the reason if it was already evicted, else None."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        try:
            reason = self.explain_eviction()
            if reason is None:
                _set_used_now(self._record)
            yield reason
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def explain_eviction(self) -> str | None:
        """Return the reason why the arena was evicted, or None if it was not."""
        try:
            return str(json.loads(self._record.read_text())["reason"]) or None
        except (OSError, ValueError):
            return "the record of the arena was removed"

    def call_on_eviction(self, release: Callable[[], None]) -> None:
        """Call `release` once, either in a thread when another process evicts the arena, or in `close`."""
        self._release = release
        Thread(target=self._await_eviction, name="arena eviction", daemon=True).start()

    def _await_eviction(self) -> None:
        if os.read(self._noticed, 1):
            self._release_once()
        os.close(self._noticed)

    def _release_once(self) -> None:
        with self._releasing:
            release, self._release = self._release, _do_nothing
            if release is not None:
                release()

    def close(self) -> None:
        """Free the memory and remove the record."""
        is_watched = self._release is not None
        try:
            self._release_once()
        finally:
            # The lock prevents another process from opening a descriptor number that was just closed and reused.
            with hold_lock(self._directory / LOCK):
                self._record.unlink(missing_ok=True)
                unmap_memory(self.address, self.size)
                os.close(self._descriptor)
            os.close(self._notice)  # ends the thread
            if not is_watched:
                os.close(self._noticed)


class ArenaPool:
    """Arenas of all processes of this user, recorded in `directory`, with a shared limit of `capacity` bytes."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory, self.capacity = directory, capacity
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @classmethod
    def open_shared(cls) -> ArenaPool:
        """Return this user's pool. By default, its limit is half of the machine's memory."""
        given = SLEEP_MEMORY_BYTES.read()
        return cls(runtime_dir() / "sleep", int(given) if given >= 0 else processes.read_total_memory() // 2)

    def create_arena(self, model: str, size: int) -> Arena:
        """Create an arena of `size` bytes. Evict the least recently used arenas until it fits.

        Raises:
            ArenaSpaceError: The arena exceeds the limit, the other arenas are in use, or the kernel has no memory.
        """
        wanted = f"{format_memory(size)} for {model}"
        with hold_lock(self.directory / LOCK):
            records = sorted(self._read(), key=lambda one: one[0].stat().st_mtime_ns)
            used = sum(record.size for _, record in records)
            for path, record in records if size <= self.capacity else ():
                if used + size <= self.capacity:
                    break
                if _evict(path, record, f"another model needed the memory: {wanted}"):
                    used -= record.size
            if used + size > self.capacity:
                limit = f"{format_memory(used)} of {format_memory(self.capacity)} are in use"
                raise ArenaSpaceError(
                    f"not enough host memory to reserve {wanted}: {limit}; increase {SLEEP_MEMORY_BYTES}"
                )
            try:
                return Arena(self.directory, model, size)
            except OSError as error:
                raise ArenaSpaceError(
                    f"cannot reserve {wanted} of host memory: {error.strerror or error}"
                ) from error

    def _read(self) -> Iterator[tuple[Path, _Record]]:
        """Yield the arenas of running processes, and remove the records of processes that have ended."""
        for path in self.directory.glob("*.json"):
            try:
                record = _Record(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if not processes.is_alive(record.pid, record.born):
                path.unlink(missing_ok=True)
            elif not record.reason:
                yield path, record


def _set_used_now(record: Path) -> None:
    """Set the time of an arena's last use to now; the kernel's own timestamps have a resolution of milliseconds."""
    now = time.time_ns()
    os.utime(record, ns=(now, now))


def _evict(path: Path, record: _Record, reason: str) -> bool:
    """Evict an arena unless its owner is using it. Return whether its memory was freed."""
    if (descriptor := record.open()) is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.write_text(json.dumps(asdict(record) | {"reason": reason}))
        os.ftruncate(descriptor, 0)
    except OSError:  # includes BlockingIOError
        return False
    finally:
        os.close(descriptor)
    record.notify()
    return True
