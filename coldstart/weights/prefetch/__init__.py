"""Prefetcher: one process per source and weights plan, which fetches weights into shared memory before a server needs them.

`client` is the interface for processes that need weights, and `daemon` is the process. Both use only the
standard library.
"""
