"""Prometheus metrics of a host, in their own registry: `coldstart_host_...`, times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstart.host.model_state import State

if TYPE_CHECKING:
    from coldstart.host.live.tickets import Ticket

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "coldstart_host_"


class Metrics:
    """Counters that are updated as requests end; the collector `rest` reads all other metrics on demand."""

    def __init__(self, rest: Collector, prefix: str = _PREFIX) -> None:
        self.registry = registry = CollectorRegistry()
        self._answers = Counter(
            f"{prefix}answers",
            "Number of answered requests, by HTTP status (499: the client disconnected).",
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
            f"{prefix}first_piece_seconds",
            "Time in seconds from arrival to the first piece of the answer.",
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

    def count_answer(self, ticket: Ticket, code: int, first_s: float | None) -> None:
        """Count the answer of an admitted request: HTTP status `code`, first piece after `first_s` seconds."""
        model = ticket.route.model
        self._answers.labels(model, str(code)).inc()
        if ticket.queued_s is not None:
            self._queued.labels(model).observe(ticket.queued_s)
        if first_s is not None:
            self._first.labels(model).observe(first_s)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


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
        refused = CounterMetricFamily(
            f"{_PREFIX}refused", "Number of rejected requests, by HTTP status.", labels=["code"]
        )
        for code, count in requests["refused"].items():
            refused.add_metric([code], count)
        yield refused
        for name, about in (
            ("held", "Number of requests that wait for the model."),
            ("in_flight", "Number of requests in progress."),
            ("held_bytes", "Memory reserved for the model."),
            ("gpu_memory_bytes", "GPU memory of the model's server, where it can be measured."),
        ):
            family = GaugeMetricFamily(f"{_PREFIX}model_{name}", about, labels=["model"])
            for model in document["models"]:
                if name in model:
                    family.add_metric([model["name"]], model[name])
            yield family
        states = GaugeMetricFamily(
            f"{_PREFIX}model_state",
            "1 for the current state of the model, else 0.",
            labels=["model", "state"],
        )
        for model in document["models"]:
            for state in State:
                states.add_metric([model["name"], str(state)], float(model["state"] == state))
        yield states
