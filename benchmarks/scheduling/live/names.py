"""Names of the schedulers that the live benchmark compares, as its results have them."""

BASELINE, CONTROL, HONEST, MLFQ = "fcfs", "fcfs-again", "fcfs-max", "mlfq"
BOUNDS = {"mlfq-bounded": "0.5"}
"""Shares of the time in order of arrival, by name."""
