"""Prefetcher: one process per source and weights plan, which fetches weights into shared memory before a server needs them.

`client` is the interface for processes that need weights, and `service` is the process. After each of these errors, a client
loads from files.
"""


class PrefetchError(RuntimeError):
    """The prefetcher cannot provide the bytes; the message has the reason."""


class PrefetchRefusedError(PrefetchError):
    """The prefetcher rejected the request: too little memory, a malformed plan or an unreadable source."""


class PrefetchLostError(PrefetchError):
    """No prefetcher runs, or it ended; fetched bytes stay readable and no more will arrive."""


class PrefetchFailedError(PrefetchError):
    """The prefetcher stopped trying to fetch some bytes; the message names the file, the tensor and the offset."""
