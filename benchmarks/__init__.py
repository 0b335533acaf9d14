"""Benchmarks by claim; `python -m benchmarks` lists them."""
