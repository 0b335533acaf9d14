"""Prometheus metrics of a host or a fleet, and the recorder of a host's starts. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstart.contract import fallback
from coldstart.host.configuration import HostFile
from coldstart.host.live.log import Log
from coldstart.host.live.servers import ReadyServer
from coldstart.host.model_state import ModelState
from coldstart.host.status import HostFacts

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StatusMetric:
    """Metric whose value is at `status_path` in the status document, such as `host.memory_bytes`.

    Non-empty text counts as 1, and "" as 0. A path into a list, such as `models.held`, yields one value for each model
    that has the field. A mapping yields one value for each HTTP status. If `choices` is set, the value is 1 for the
    choice that the field equals, and 0 for the others.
    """

    name: str
    about: str
    status_path: str
    is_counter: bool = False
    choices: tuple[str, ...] = ()

    def measure(self, prefix: str, document: Document) -> Metric:
        """Build the metric from a status document."""
        part, _, member = self.status_path.partition(".")
        holder, labels = document[part], list[str]()
        found: dict[tuple[str, ...], Any]
        if isinstance(holder, list):
            labels, found = ["model"], {(one["name"],): one[member] for one in holder if member in one}
        elif isinstance(holder[member], dict):
            labels, found = ["code"], {(code,): count for code, count in holder[member].items()}
        else:
            found = {(): holder[member]}
        if self.choices:
            labels.append(member)
            found = {(*key, one): value == one for key, value in found.items() for one in self.choices}
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = kind(prefix + self.name, self.about, labels=labels)
        for key, value in found.items():
            family.add_metric(key, float(bool(value) if isinstance(value, str) else value))
        return family


REFUSED = "Number of rejected requests, by HTTP status."
IN_FLIGHT = StatusMetric("model_in_flight", "Number of requests in progress.", "models.in_flight")
HOST = (
    StatusMetric("memory_limit_bytes", "Memory limit for all models.", "host.memory_bytes"),
    StatusMetric("memory_used_bytes", "Reserved memory.", "host.memory_used_bytes"),
    StatusMetric(
        "runtime_template_bytes", "Reserved memory of the runtime template.", "host.runtime_template_bytes"
    ),
    StatusMetric(
        "client_keys_refused", "1 while the client key file cannot be used, else 0.", "host.client_keys_error"
    ),
    StatusMetric("requests", "Number of requests for a known model.", "requests.total", is_counter=True),
    StatusMetric("hits", "Number of requests whose model was ready.", "requests.hits", is_counter=True),
    StatusMetric(
        "departures", "Number of times that a model left its tier.", "starts.departures", is_counter=True
    ),
    StatusMetric("refused", REFUSED, "requests.refused", is_counter=True),
    StatusMetric("model_held", "Number of requests that wait for the model.", "models.held"),
    IN_FLIGHT,
    StatusMetric("model_held_bytes", "Memory reserved for the model.", "models.held_bytes"),
    StatusMetric("model_gpu_memory_bytes", "GPU memory of the model's server.", "models.gpu_memory_bytes"),
    StatusMetric(
        "model_state",
        "1 for the state of the model, else 0.",
        "models.state",
        choices=(*map(str, ModelState),),
    ),
)


class Metrics(Collector):
    """Prometheus collector with counters that are updated when requests end, and metrics that are read from the status."""

    def __init__(
        self,
        status: Callable[[], Document],
        prefix: str = "coldstart_host_",
        figures: Iterable[StatusMetric] = HOST,
    ) -> None:
        self._status, self._prefix, self._figures = status, prefix, figures
        self.registry = CollectorRegistry()
        self._responses = self.add_counter(
            "responses",
            "Number of responses, by HTTP status (499: the client disconnected).",
            "model",
            "code",
        )
        self._queued = self.add_histogram("queued_seconds", "Time until the request was forwarded.", "model")
        self._first = self.add_histogram(
            "time_to_first_token_seconds",
            "Time to the first chunk, the start of the model included.",
            "model",
        )
        self._clients = self.add_counter(
            "client_requests",
            "Number of requests with a client's own key: admitted or other_model (not allowed).",
            "client",
            "outcome",
        )
        self.registry.register(self)

    def add_counter(self, name: str, about: str, *labels: str, prefix: str = "") -> Counter:
        """Register and return a new counter."""
        return Counter((prefix or self._prefix) + name, about, labels, registry=self.registry)

    def add_histogram(self, name: str, about: str, *labels: str, prefix: str = "") -> Histogram:
        """Register and return a new histogram of durations in seconds."""
        name = (prefix or self._prefix) + name
        return Histogram(name, about, labels, buckets=BUCKETS_S, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the current status document (prometheus_client's Collector)."""
        document = self._status()
        return (one.measure(self._prefix, document) for one in self._figures)

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering this collector does not call `collect` (prometheus_client's Collector)."""
        return ()

    def count_client_request(self, name: str, outcome: str) -> None:
        """Count a request of the client `name`. `outcome` is "admitted", or the reason for the rejection."""
        self._clients.labels(name, outcome).inc()

    def count_response(self, model: str, code: int, queued_s: float | None, first_s: float | None) -> None:
        """Count the response to an admitted request, with the HTTP status `code`.

        The request was forwarded after `queued_s` seconds (None: never). The first chunk of the response arrived after
        `first_s` seconds (None: never).
        """
        self._responses.labels(model, str(code)).inc()
        if queued_s is not None:
            self._queued.labels(model).observe(queued_s)
        if first_s is not None:
            self._first.labels(model).observe(first_s)

    def format_text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class EventRecorder:
    """Recorder that reports the events of one host in its facts, its metrics and its log."""

    def __init__(self, log: Log, facts: HostFacts, status: Callable[[], Mapping[str, Any]]) -> None:
        self.log, self.facts = log, facts
        self.metrics = metrics = Metrics(status)
        self._starts = metrics.add_histogram(
            "start_seconds", "Duration of successful starts.", "model", "mode"
        )
        self._phases = metrics.add_histogram(
            "start_phase_seconds",
            "Time in a phase of a successful start; a phase can contain others.",
            "phase",
            "mode",
            prefix="coldstart_",
        )
        self._failed = metrics.add_counter("failed_starts", "Number of failed starts.", "model")
        self._missed = metrics.add_counter(
            "prewarms_missed", "Number of scheduled moments at which the model did not start.", "model"
        )
        self._fallbacks = metrics.add_counter(
            "fallbacks",
            "Number of fallbacks of successful starts, by section of the bundle or start mode.",
            "section",
            prefix="coldstart_",
        )

    def record_start(self, name: str, ready: ReadyServer, mode: str, seconds: float) -> None:
        """Record that a server became ready or woke up, `seconds` seconds after its start was ordered."""
        facts, document = self.facts.get_model(name), ready.document
        facts.starts += 1
        facts.mode, facts.pid, facts.gpu_memory_bytes = ready.mode, ready.pid, None
        phases, fallbacks = document.get("phases", {}), fallback.decode_fallbacks(document.get("fallbacks"))
        facts.last_start = {
            "at_unix_s": time.time(),
            "mode": mode,
            "seconds": seconds,
            "phases": phases,
            "fallbacks": fallback.encode(fallbacks),
            "spans": document.get("spans", ()),
        }
        summed: dict[str, float] = {}
        for span, spent_s in phases.items():
            # Sum the spans of all CUDA graphs as one phase.
            phase = span.partition(": ")[0]
            summed[phase] = summed.get(phase, 0.0) + spent_s
        self._remember(name, mode, seconds, None, summed)
        self.facts.total_start_s += seconds
        self._starts.labels(name, mode).observe(seconds)
        for phase, spent_s in summed.items():
            self._phases.labels(phase, mode).observe(spent_s)
        self.log.write("ready", model=name, mode=mode, seconds=round(seconds, 4), pid=facts.pid)
        for one in fallbacks:
            self._fallbacks.labels(one.stage).inc()
            self.log.write("fallback", model=name, **one.encode())

    def record_failed_start(self, name: str, reason: str, seconds: float) -> None:
        """Record that a start failed after `seconds` seconds."""
        self.facts.failed_starts += 1
        self._remember(name, None, seconds, reason, {})
        self._failed.labels(name).inc()
        self.log.write("start failed", model=name, seconds=round(seconds, 4), reason=reason)

    def record_missed_prewarming(self, name: str, reason: str) -> None:
        """Record that a model did not start at a scheduled time."""
        self._missed.labels(name).inc()
        self.log.write("prewarm missed", model=name, reason=reason)

    def record_server_end(self, name: str) -> None:
        """Record that the model no longer has a running server."""
        facts = self.facts.get_model(name)
        facts.mode = facts.pid = facts.gpu_memory_bytes = None

    def register_models(self, file: HostFile) -> None:
        """Initialize the metrics of the models in a new configuration, and record their aliases and adapters."""
        for name, launch in file.catalogue.launches.items():
            # Prometheus sees no increase in a counter whose first value is 1.
            self._failed.labels(name)
            self._missed.labels(name)
            facts = self.facts.get_model(name)
            facts.aliases = [given for given, _ in launch.names() if given not in (name, *launch.adapters)]
            facts.adapters = list(launch.adapters)

    def _remember(
        self, name: str, mode: str | None, seconds: float, error: str | None, phases: Mapping[str, float]
    ) -> None:
        row = {"model": name, "at_unix_s": time.time(), "mode": mode, "seconds": seconds, "error": error}
        self.facts.recent_starts.append({**row, "phases": phases})
