"""Prometheus metrics of a host, in their own registry: `coldstart_host_...`, times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstart.host.model_state import State

if TYPE_CHECKING:
    pass

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "coldstart_host_"
REQUESTS = {
    "held": "Number of requests that wait for the model.",
    "in_flight": "Number of requests in progress.",
}
MEMORY = {
    "held_bytes": "Memory reserved for the model.",
    "gpu_memory_bytes": "GPU memory of the model's server, where it can be measured.",
}
"""Members of a model in the status document, with the help texts of their metrics."""


class Metrics:
    """Counters that are updated as requests end; the collector `rest` reads all other metrics on demand."""

    def __init__(self, rest: Collector, prefix: str = _PREFIX) -> None:
        self.registry = registry = CollectorRegistry()
        self._responses = Counter(
            f"{prefix}responses",
            "Number of responses, by HTTP status (499: the client disconnected).",
            ("model", "code"),
            registry=registry,
        )
        self._queued = Histogram(
            f"{prefix}queued_seconds",
            "Time in seconds from arrival until the request was forwarded.",
            ("model",),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._first = Histogram(
            f"{prefix}time_to_first_token_seconds",
            "Time in seconds from arrival to the first chunk of the response, the start of the model included.",
            ("model",),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._clients = Counter(
            f"{prefix}client_requests",
            "Number of requests with a client's own key: admitted or other_model (not allowed).",
            ("client", "outcome"),
            registry=registry,
        )
        self.registry.register(rest)

    def count_client(self, name: str, outcome: str) -> None:
        """Count a request of the client `name`: "admitted", or the reason of its refusal."""
        self._clients.labels(name, outcome).inc()

    def count_answer(self, model: str, code: int, queued_s: float | None, first_s: float | None) -> None:
        """Count the response to an admitted request: HTTP status `code`.

        It was forwarded after `queued_s` seconds, and its first chunk came after `first_s` seconds.
        """
        self._responses.labels(model, str(code)).inc()
        if queued_s is not None:
            self._queued.labels(model).observe(queued_s)
        if first_s is not None:
            self._first.labels(model).observe(first_s)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


def count_refusals(prefix: str, refused: Mapping[str, int]) -> Metric:
    """Return the number of rejected requests by HTTP status."""
    family = CounterMetricFamily(
        f"{prefix}refused", "Number of rejected requests, by HTTP status.", labels=["code"]
    )
    for code, count in refused.items():
        family.add_metric([code], count)
    return family


def list_gauges(
    prefix: str, models: Iterable[Mapping[str, Any]], members: Mapping[str, str]
) -> Iterator[Metric]:
    """Yield a gauge for each of these members of the models; `members` has their help texts."""
    models = tuple(models)
    for name, about in members.items():
        family = GaugeMetricFamily(f"{prefix}model_{name}", about, labels=["model"])
        for model in models:
            if name in model:
                family.add_metric([model["name"]], model[name])
        yield family


class HostStatus(Collector):
    """Collector that reads the status document."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the status document (prometheus_client's Collector)."""
        document = self._status()
        host, requests = document["host"], document["requests"]
        yield GaugeMetricFamily(
            f"{_PREFIX}memory_limit_bytes", "Memory limit for all models.", host["memory_bytes"]
        )
        yield GaugeMetricFamily(f"{_PREFIX}memory_used_bytes", "Reserved memory.", host["memory_used_bytes"])
        yield GaugeMetricFamily(
            f"{_PREFIX}runtime_template_bytes",
            "Reserved memory of the runtime template.",
            host["runtime_template_bytes"],
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}client_keys_refused",
            "1 while the client key file cannot be used and the former keys remain, else 0.",
            float(bool(host["client_keys_error"])),
        )
        yield CounterMetricFamily(
            f"{_PREFIX}requests", "Number of requests for a known model.", requests["total"]
        )
        yield CounterMetricFamily(
            f"{_PREFIX}hits", "Number of requests whose model was ready.", requests["hits"]
        )
        yield CounterMetricFamily(
            f"{_PREFIX}departures",
            "Number of times that a model left its tier.",
            document["starts"]["departures"],
        )
        yield count_refusals(_PREFIX, requests["refused"])
        yield from list_gauges(_PREFIX, document["models"], REQUESTS | MEMORY)
        states = GaugeMetricFamily(
            f"{_PREFIX}model_state",
            "1 for the current state of the model, else 0.",
            labels=["model", "state"],
        )
        for model in document["models"]:
            for state in State:
                states.add_metric([model["name"], str(state)], float(model["state"] == state))
        yield states


class StartMetrics:
    """Counters and histograms of starts in `registry`, which `Record` updates as each start ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.starts = Histogram(
            "coldstart_host_start_seconds",
            "Duration in seconds of successful starts.",
            ("model", "mode"),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self.phases = Histogram(
            "coldstart_start_phase_seconds",
            "Time in seconds in a phase of a successful start; a phase can contain others.",
            ("phase", "mode"),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self.failed = Counter(
            "coldstart_host_failed_starts", "Number of failed starts.", ("model",), registry=registry
        )
        self.missed = Counter(
            "coldstart_host_prewarms_missed",
            "Number of scheduled moments at which the model did not start.",
            ("model",),
            registry=registry,
        )
        self.fallbacks = Counter(
            "coldstart_fallbacks",
            "Number of fallbacks of successful starts, by section of the bundle or start mode.",
            ("section",),
            registry=registry,
        )


def sum_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase from those of the spans. The spans of all CUDA graphs are one phase."""
    summed: dict[str, float] = {}
    for name, spent_s in phases.items():
        phase = name.partition(": ")[0]
        summed[phase] = summed.get(phase, 0.0) + spent_s
    return summed
