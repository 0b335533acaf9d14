"""Attaching to the prefetcher: the open socket is the lease, its end tells of the other side's death.

Bytes of `Attached.file` are valid once `wait` returned for them; the mapping is private, so nobody else sees what is
written to it, and it outlives the prefetcher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coldstart.prefetch.errors import PrefetchError, PrefetchFailed, PrefetchLost, PrefetchRefused

__all__ = [
    "Attached",
    "PrefetchError",
    "PrefetchFailed",
    "PrefetchLost",
    "PrefetchRefused",
    "attach",
    "request",
    "start_early",
]


def attach(
    source: str,
    plan: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    background: bool = False,
    start: bool = True,
    directory: Path | None = None,
) -> Attached:
    """Take a lease on the weights of `plan` and want the tensors `names` (None: all bytes of all files, in their order).

    `source` is a local directory, http(s)://..., s3://bucket/prefix or hf://repo@revision. `directory` is where the
    prefetcher's socket lies (default: the user's runtime directory); `start` starts a prefetcher when none runs.
    Raises PrefetchRefused (no room, a bad plan, no prefetcher and not `start`), PrefetchLost when it dies meanwhile.
    """
    raise NotImplementedError


def start_early(
    source: str,
    plan: Mapping[str, Any],
    names: Collection[str] | None = None,
    *,
    directory: Path | None = None,
) -> Early:
    """Have fetching begin, without waiting for anything: a prefetcher is started if none runs, and finds the request.

    Returns within milliseconds. The request lives until it is fetched and somebody attached, or `Early.close()`, or
    the death of this process. Raises PrefetchError only when no process can be started.
    """
    raise NotImplementedError


def request(operation: str, *, directory: Path | None = None) -> dict[str, Any]:
    """Ask the running prefetcher for its "status", or to "stop". Raises PrefetchLost when none runs."""
    raise NotImplementedError


class Early:
    """The lease of whoever asked first."""

    def close(self) -> None:
        """Give the lease back."""
        raise NotImplementedError


class Attached:
    """A lease on the weights of one plan. A context manager; safe to use from several threads."""

    def file(self, name: str) -> memoryview:
        """The whole file, writable, mapped privately. Raises KeyError for a name that is not in the plan."""
        raise NotImplementedError

    def wait(self, file: str, offset: int, size: int) -> None:
        """Block until bytes [offset, offset + size) of `file` are there and verified; they must be wanted.

        Raises PrefetchLost when the prefetcher died first, PrefetchFailed when it gave up on one of them,
        PrefetchRefused when they lie outside of the file.
        """
        raise NotImplementedError

    def want(self, names: Collection[str] | None, background: bool = False) -> None:
        """Want more tensors, after those wanted before; in the background: when no foreground want is unfinished."""
        raise NotImplementedError

    def finished(self, names: Collection[str] | None = None) -> bool:
        """Whether all bytes of the tensors are there, without blocking. Raises as `wait`."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """{"fetched_bytes", "wanted_bytes", "ready_bytes", "refetched", "streams", "began", "ended", "errors"}.

        Bytes of this model; `began` and `ended` are seconds on CLOCK_MONOTONIC or None. Raises PrefetchLost.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give the lease back. Mapped files stay readable while somebody holds a view of them."""
        raise NotImplementedError

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
