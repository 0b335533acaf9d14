"""Levels of a template process: how much it has built before it starts a server."""

from __future__ import annotations

RUNTIME, ENGINE = "runtime", "engine"
SLEEP_LEVELS = {"asleep-1": 1, "asleep-2": 2}
"""The levels of an engine that sleeps, as vLLM counts them."""
LEVELS = (RUNTIME, ENGINE, *SLEEP_LEVELS)
