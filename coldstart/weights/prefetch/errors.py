"""What can go wrong between a worker and the prefetcher; each of them is a reason to load from files instead."""

from __future__ import annotations


class PrefetchError(RuntimeError):
    """The prefetcher cannot give these bytes; the message says why."""


class PrefetchRefusedError(PrefetchError):
    """It does not take the request: no room, a malformed plan, a source that it cannot read."""


class PrefetchLostError(PrefetchError):
    """Its process has ended. What was waited for stays readable; nothing more will come."""


class PrefetchFailedError(PrefetchError):
    """It gave up on some bytes: the message names file, tensor and offset."""
