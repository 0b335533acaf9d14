"""Prefetcher: one process per source and weights plan, which fetches weights into shared memory before a server needs them.

`client` is the interface for processes that need weights, and `service` is the prefetcher process itself. On any
PrefetchError, the client falls back to loading from files.
"""


class PrefetchError(RuntimeError):
    """The prefetcher cannot provide the bytes. The message states the reason."""


class PrefetchRefusedError(PrefetchError):
    """The prefetcher rejected the request because of too little memory, a malformed plan or an unreadable source."""


class PrefetchLostError(PrefetchError):
    """No prefetcher is running, or it exited. Fetched bytes stay readable, and no more will arrive."""


class PrefetchFailedError(PrefetchError):
    """The prefetcher gave up on fetching some bytes. The message names the file, the tensor and the offset."""
