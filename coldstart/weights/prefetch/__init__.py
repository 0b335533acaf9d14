"""The prefetcher: one process per user and node that brings weights into shared memory before anybody asks for them.

`client` is for those who want weights, `daemon` is the process; both are standard library only.
"""
