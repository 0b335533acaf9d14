"""Decide at a start whether a feature can use the installed vLLM.

It compares the version with those that the end-to-end tests ran with, and guards the imports of the feature.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from coldstart.system import runtime

if TYPE_CHECKING:
    from coldstart.contract.fallback import Fallback

Feature = Literal[
    "start", "worker", "compile", "lazy-kv", "template", "weights", "scheduler", "deadline", "offload", "graphs",
    "deferred-capture", "kv-plan",
    "aot", "offline", "headless", "late-interaction", "stock", "ahead", "standby", "ending", "application",
    "logging", "progress", "end-requests", "handover", "sharing", "sleep",
]  # fmt: skip
Versions = tuple[tuple[int, int], tuple[int, int]]

_NOT_0_33: tuple[Feature, ...] = ("compile", "scheduler", "offload", "standby", "headless")
CHECKED: dict[Feature, Versions] = {
    **dict.fromkeys(_NOT_0_33, ((0, 31), (0, 33))),
    **dict.fromkeys(
        ("graphs", "deferred-capture", "late-interaction", "handover", "sharing", "sleep"), ((0, 32), (0, 33))
    ),
}
"""Versions that a feature was checked with, where they are fewer than the supported ones."""

log = logging.getLogger("vllm.coldstart")
fallbacks: list[Fallback] = []
"""Fallbacks that occurred in this process after its server had started it."""
sources: list[Callable[[], Iterable[Fallback]]] = []
"""Functions that return the fallbacks of one feature until now."""


def check(feature: Feature, load: Callable[[], object] | None = None) -> str | None:
    """Return why this vLLM cannot serve `feature`, as a sentence; None if it can.

    `load` imports or calls what needs the feature's names: a missing name is the reason.
    """
    if reason := _unchecked(feature):
        return reason
    try:
        if load is not None:
            load()
    except (ImportError, AttributeError) as error:
        return f"vLLM {version()} lacks an integration point of {feature!r}: {error}."
    return None


def fall_back(section: str, reason: str) -> None:
    """Log a fallback of this process, and store it for the worker's report."""
    from coldstart.contract.fallback import Fallback

    log.warning("coldstart: %s: %s", section, reason)
    fallbacks.append(Fallback(section, reason))


def report() -> dict[str, Any]:
    """Return a worker's report to its server, see WORKER_REPORT."""
    from coldstart.contract import fallback
    from coldstart.weights.load import ladder

    loaded, found = ladder.describe_last(), [*fallbacks, *(one for source in sources for one in source())]
    return {
        "pid": os.getpid(),
        "fast_path": {one.stage: False for one in found},
        "fallbacks": [*fallback.encode(found), *loaded.get("fallbacks", [])],
        "load": loaded,
    }


def version() -> str:
    """Return the installed vLLM's version, "unknown" if it is not installed."""
    distribution = runtime.find_vllm_distribution()
    return distribution[1] if distribution else "unknown"


def _unchecked(feature: Feature) -> str | None:
    low, high = CHECKED.get(feature, runtime.SUPPORTED_VLLM)
    if runtime.find_vllm_distribution() is None:
        return "vLLM is not installed."
    if runtime.is_within(version(), (low, high)):
        return None
    return (
        f"vLLM {version()} was not checked for {feature!r}: it needs {low[0]}.{low[1]} or later, "
        f"below {high[0]}.{high[1]}."
    )
