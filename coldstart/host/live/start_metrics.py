"""Metrics of the starts of a host. A gateway of a fleet has none: it does not start servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from coldstart.host.live.metrics import BUCKETS_S

if TYPE_CHECKING:
    from coldstart.contract.fallback import Fallback


STAGES = frozenset(
    {
        "allocate the KV cache",
        "build app",
        "build worker",
        "canary batch",
        "coldstart",
        "compile or warm up",
        "compile the model or size the KV cache",
        "configure",
        "construct model",
        "fetch weights",
        "first token",
        "fork the server",
        "import app",
        "import engine",
        "import torch",
        "import vllm",
        "load the model",
        "load weights",
        "read tensors",
        "restore compiled forward",
        "start engine",
        "wait for the template",
        "wake the engine",
        "warm up",
    }
)
"""Names of the spans of a start. The spans of CUDA graphs, one for each graph, are the stage `graphs`; all others `other`."""


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
        self._stages = Histogram(
            "coldstart_start_stage_seconds",
            "Time in seconds in a stage of a successful start; stages can contain each other.",
            ("stage", "mode"),
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

    def add_model(self, model: str) -> None:
        """Set the counters of a model to 0: Prometheus sees no increase in a counter that begins at 1."""
        self._failed.labels(model)
        self._missed.labels(model)

    def count_start(self, model: str, mode: str, seconds: float, phases: Mapping[str, float]) -> None:
        """Count a start of `model` that took `seconds`; `phases` are seconds by the name of a span."""
        self._starts.labels(model, mode).observe(seconds)
        for stage, spent_s in sum_stages(phases).items():
            self._stages.labels(stage, mode).observe(spent_s)

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


def sum_stages(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage from those of the spans. There are few stages, while each CUDA graph is a span."""
    stages: dict[str, float] = {}
    for name, spent_s in phases.items():
        stage = find_stage(name)
        stages[stage] = stages.get(stage, 0.0) + spent_s
    return stages


def find_stage(span: str) -> str:
    """Return the value of the label `stage` for the name of a span; there are few such values."""
    if span.startswith("graphs: "):
        return "graphs"
    return span if span in STAGES else "other"
