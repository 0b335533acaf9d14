"""What the driver notes of its models for the status, the metrics and the log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import coldstart
from coldstart.contract import fallback
from coldstart.gateway.log import Log
from coldstart.gateway.metrics import HostStatus, Metrics
from coldstart.gateway.servers import Ready
from coldstart.host.configuration import HostFile
from coldstart.host.status import HostFacts, LastStart


class Record:
    """Facts, metrics and log of one host; each thing that happens is noted in all that care."""

    def __init__(self, log: Log, began: float, status: Callable[[], Mapping[str, Any]]) -> None:
        self.log = log
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=began)
        self.metrics = Metrics(HostStatus(status))

    def started(self, name: str, ready: Ready, mode: str, seconds: float) -> None:
        """A server is ready, or awake again."""
        facts, document = self.facts.of(name), ready.document
        facts.starts += 1
        facts.mode, facts.pid = ready.mode, ready.pid
        phases, fallbacks = document.get("phases", {}), fallback.from_json(document.get("fallbacks"))
        facts.last_start = LastStart(time.time(), mode, seconds, phases, tuple(fallbacks))
        self._remember(name, mode, seconds, None)
        self.facts.start_s += seconds
        self.metrics.started(name, mode, seconds)
        self.log.say("ready", model=name, mode=mode, seconds=round(seconds, 4), pid=facts.pid)
        self.metrics.fell_back(fallbacks)
        for one in fallbacks:
            self.log.say("fallback", model=name, **one.to_json())

    def start_failed(self, name: str, reason: str, seconds: float) -> None:
        """A start came to nothing."""
        self.facts.failed_starts += 1
        self._remember(name, None, seconds, reason)
        self.metrics.start_failed(name)
        self.log.say("start failed", model=name, seconds=round(seconds, 4), reason=reason)

    def ended(self, name: str) -> None:
        """No server of it runs."""
        facts = self.facts.of(name)
        facts.mode = facts.pid = None

    def asked(self, name: str, hit: bool) -> None:
        """A request was taken in."""
        facts = self.facts.of(name)
        facts.requests += 1
        facts.hits += hit

    def described(self, file: HostFile) -> None:
        """The models are these from now on."""
        for name, launch in file.catalogue.launches.items():
            facts = self.facts.of(name)
            facts.aliases = [given for given, _ in launch.names() if given not in (name, *launch.adapters)]
            facts.adapters = list(launch.adapters)
            if facts.memory_source != "observed":
                facts.memory_source = file.sources.get(name, "file")

    def _remember(self, name: str, mode: str | None, seconds: float, error: str | None) -> None:
        row = {"model": name, "at_unix_s": time.time(), "mode": mode, "seconds": seconds, "error": error}
        self.facts.recent_starts.append(row)
