"""Decide at server start whether a feature supports the installed vLLM.

The decision compares vLLM's version with the versions that the end-to-end tests ran with, and checks that the feature's
imports succeed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.system import runtime

Feature = Literal[
    "start", "worker", "compile", "lazy-kv", "template", "weights", "scheduler", "deadline", "graphs",
    "deferred-capture", "kv-plan",
    "aot", "offline", "headless", "late-interaction", "ahead", "standby", "ending", "application",
    "logging", "progress", "end-requests", "handover", "sharing", "sleep",
]  # fmt: skip
Versions = tuple[tuple[int, int], tuple[int, int]]

CHECKED_VERSIONS: dict[Feature, Versions] = {
    "graphs": ((0, 32), (0, 33)),
    **dict.fromkeys(
        ("deferred-capture", "late-interaction", "handover", "sharing", "sleep"), ((0, 32), (0, 34))
    ),
}
"""Range of vLLM versions that each feature was tested with, if it is smaller than the supported range."""

log = logging.getLogger("vllm.coldstart")
import_s: list[float] = []
"""Age of this process, in seconds, when it had imported vLLM; 0 in a server that forks its engine, and in its forks."""
fallbacks: list[Fallback] = []
"""Fallbacks that were recorded in this process."""
fallback_sources: list[Callable[[], Iterable[Fallback]]] = []
"""Functions that return the current fallbacks of one feature."""


def find_unsupported_reason(feature: Feature, load: Callable[[], object] | None = None) -> str | None:
    """Return the reason why `feature` does not support the installed vLLM, or None if it does.

    `load` imports or calls what the feature uses; if it raises ImportError or AttributeError, that error is the reason.
    """
    if reason := _unchecked(feature):
        return reason
    try:
        if load is not None:
            load()
    except (ImportError, AttributeError) as error:
        return f"vLLM {get_vllm_version()} lacks what the feature {feature!r} needs: {error}"
    return None


def record_fallback(section: str, reason: str) -> None:
    """Log a fallback that occurred in this process, and store it for the worker's report."""
    log.warning("coldstart: %s: %s", section, reason)
    fallbacks.append(Fallback(section, reason))


def note_import() -> None:
    """Record the age of this process, unless a process that has imported vLLM forked it."""
    import psutil

    if not import_s:
        import_s.append(time.time() - psutil.Process().create_time())


def build_worker_report() -> dict[str, Any]:
    """Return this worker's report for its server: unused bundle sections, fallbacks, weights and the cost of imports."""
    from coldstart.weights.load import ladder

    loaded, found = (
        ladder.describe_last_load(),
        [*fallbacks, *(one for source in fallback_sources for one in source())],
    )
    return {
        "pid": os.getpid(),
        "fast_path": {one.stage: False for one in found},
        "fallbacks": [*fallback.encode(found), *loaded.get("fallbacks", [])],
        "load": loaded,
        "import_s": sum(import_s),
    }


def get_vllm_version() -> str:
    """Return the version of the installed vLLM, or "unknown" if it is not installed."""
    distribution = runtime.find_vllm_distribution()
    return distribution[1] if distribution else "unknown"


def _unchecked(feature: Feature) -> str | None:
    low, high = CHECKED_VERSIONS.get(feature, runtime.SUPPORTED_VLLM)
    if runtime.find_vllm_distribution() is None:
        return "vLLM is not installed"
    if runtime.is_within(get_vllm_version(), (low, high)):
        return None
    return (
        f"vLLM {get_vllm_version()} was not tested with {feature!r}, which requires vLLM {low[0]}.{low[1]} or later, "
        f"but below {high[0]}.{high[1]}"
    )
