"""Facts about the models of a host, recorded for its status, metrics and log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from coldstart.contract import fallback
from coldstart.host.configuration import HostFile
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics, sum_phases
from coldstart.host.live.servers import Ready
from coldstart.host.status import HostFacts


class Record:
    """Facts, metrics and log of one host; each event is recorded in all of them."""

    def __init__(self, log: Log, facts: HostFacts, status: Callable[[], Mapping[str, Any]]) -> None:
        self.log, self.facts = log, facts
        self.metrics = metrics = Metrics(status)
        self._starts = metrics.histogram(
            "start_seconds", "Duration in seconds of successful starts.", ("model", "mode")
        )
        self._phases = metrics.histogram(
            "start_phase_seconds",
            "Time in seconds in a phase of a successful start; a phase can contain others.",
            ("phase", "mode"),
            prefix="coldstart_",
        )
        self._failed = metrics.counter("failed_starts", "Number of failed starts.", ("model",))
        self._missed = metrics.counter(
            "prewarms_missed", "Number of scheduled moments at which the model did not start.", ("model",)
        )
        self._fallbacks = metrics.counter(
            "fallbacks",
            "Number of fallbacks of successful starts, by section of the bundle or start mode.",
            ("section",),
            prefix="coldstart_",
        )

    def record_start(self, name: str, ready: Ready, mode: str, seconds: float) -> None:
        """Record that a server is ready, or awake again."""
        facts, document = self.facts.get_model(name), ready.document
        facts.starts += 1
        facts.mode, facts.pid, facts.gpu_memory_bytes = ready.mode, ready.pid, None
        phases, fallbacks = document.get("phases", {}), fallback.decode(document.get("fallbacks"))
        facts.last_start = {
            "at_unix_s": time.time(),
            "mode": mode,
            "seconds": seconds,
            "phases": phases,
            "fallbacks": fallback.encode(fallbacks),
            "spans": document.get("spans", ()),
        }
        summed = sum_phases(phases)
        self._remember(name, mode, seconds, None, summed)
        self.facts.start_s += seconds
        self._starts.labels(name, mode).observe(seconds)
        for phase, spent_s in summed.items():
            self._phases.labels(phase, mode).observe(spent_s)
        self.log.write("ready", model=name, mode=mode, seconds=round(seconds, 4), pid=facts.pid)
        for one in fallbacks:
            self._fallbacks.labels(one.stage).inc()
            self.log.write("fallback", model=name, **one.encode())

    def record_failed_start(self, name: str, reason: str, seconds: float) -> None:
        """Record that a start failed."""
        self.facts.failed_starts += 1
        self._remember(name, None, seconds, reason, {})
        self._failed.labels(name).inc()
        self.log.write("start failed", model=name, seconds=round(seconds, 4), reason=reason)

    def record_missed_prewarming(self, name: str, reason: str) -> None:
        """Record that a model did not start at a moment of its schedule."""
        self._missed.labels(name).inc()
        self.log.write("prewarm missed", model=name, reason=reason)

    def record_end(self, name: str) -> None:
        """Record that the model has no running server."""
        facts = self.facts.get_model(name)
        facts.mode = facts.pid = facts.gpu_memory_bytes = None

    def describe(self, file: HostFile) -> None:
        """Register the models of a new configuration in the status table."""
        for name, launch in file.catalogue.launches.items():
            # Prometheus sees no increase in a counter that begins at 1.
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
