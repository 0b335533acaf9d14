"""Metrics of the starts of a host. A gateway of a fleet has none: it does not start servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from coldstart.host.live.metrics import BUCKETS_S

if TYPE_CHECKING:
    from coldstart.contract.fallback import Fallback


class StartMetrics:
    """Counters and histograms of starts in `registry`, updated as each start ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._starts = Histogram(
            "coldstart_host_start_seconds",
            "Duration in seconds of successful starts.",
            ("model", "mode"),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._failed = Counter(
            "coldstart_host_failed_starts", "Number of failed starts.", ("model",), registry=registry
        )
        self._missed = Counter(
            "coldstart_host_prewarms_missed",
            "Number of scheduled moments at which the model did not start.",
            ("model",),
            registry=registry,
        )
        self._fallbacks = Counter(
            "coldstart_fallbacks",
            "Number of fallbacks of successful starts, by stage.",
            ("stage",),
            registry=registry,
        )

    def count_start(self, model: str, mode: str, seconds: float) -> None:
        """Count a start of `model` that took `seconds`."""
        self._starts.labels(model, mode).observe(seconds)

    def count_fallbacks(self, fallbacks: Iterable[Fallback]) -> None:
        """Count the fallbacks of a start."""
        for fallback in fallbacks:
            self._fallbacks.labels(fallback.stage).inc()

    def count_failed_start(self, model: str) -> None:
        """Count a failed start."""
        self._failed.labels(model).inc()

    def count_missed_prewarming(self, model: str) -> None:
        """Count a scheduled moment at which the model did not start."""
        self._missed.labels(model).inc()
