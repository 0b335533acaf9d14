"""Benchmarks and replays of traces, and their reports."""
