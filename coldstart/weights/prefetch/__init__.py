"""Prefetcher: one process per source and weights plan, which fetches weights into shared memory before a server needs them.

`client` is the interface for processes that need weights, and `service` is the prefetcher process itself. On any
PrefetchError, the client falls back to loading from files.
"""


class PrefetchError(RuntimeError):
    """Error for bytes that the prefetcher cannot provide. The message states the reason."""


class PrefetchRefusedError(PrefetchError):
    """Error for a request that the prefetcher rejected: too little memory, a malformed plan or an unreadable source."""


class PrefetchLostError(PrefetchError):
    """Error for a prefetcher that is not running or has exited. Fetched bytes stay readable, and no more will arrive."""


class PrefetchFailedError(PrefetchError):
    """Error for bytes that the prefetcher could not fetch. The message names the file, the tensor and the offset."""
