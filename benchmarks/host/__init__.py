"""Benchmarks of the host and of its eviction policies."""
