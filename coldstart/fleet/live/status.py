"""Status document of a fleet, for `GET /fleet/status` and `coldstart fleet status`, and the metrics that are read from it.

docs/reference/http-api.md describes every member. All sizes are in bytes, all times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstart.contract import fallback
from coldstart.fleet.core import FleetCore
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.groups import FleetWorker, Group, GroupPhase
from coldstart.fleet.live.workers import Processes
from coldstart.fleet.roster import FleetServer
from coldstart.host.live.metrics import REQUESTS, count_refusals, list_gauges

SCHEMA_VERSION = 1


def fleet_status(
    core: FleetCore,
    processes: Processes,
    links: Mapping[str, float],
    in_flight: Mapping[str, int],
    hung: Mapping[str, int],
) -> dict[str, Any]:
    """Return the members `servers` and `models` of the status document.

    Args:
        core: Decisions of the fleet.
        processes: Its processes.
        links: Measured speeds of the servers' links in bytes/s.
        in_flight: Number of requests in progress by model.
        hung: Number of killed servers by model.
    """
    models = [model for model in core.models.values() if not model.retired or model.groups]
    return {
        "servers": [_server(server, links) for server in core.roster.servers.values()],
        "models": [
            _model(model, processes)
            | {"in_flight": in_flight.get(model.spec.name, 0), "hung": hung.get(model.spec.name, 0)}
            for model in models
        ],
    }


def _server(server: FleetServer, links: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": server.spec.name,
        "devices": server.spec.devices,
        "memory_bytes": server.spec.memory,
        "free_bytes": list(server.free),
        "network_bytes_s": server.spec.network,
        "observed_bytes_s": links.get(server.spec.name),
        "draining": server.draining,
    }


def _model(model: Deployment, processes: Processes) -> dict[str, Any]:
    return {
        "name": model.spec.name,
        "least": model.spec.least,
        "most": model.spec.most,
        "idle_s": model.spec.idle_s,
        "waiting": len(model.waiting),
        "failures": model.failures,
        "error": model.error if model.failures else "",
        "groups": [_group(group, processes) for group in model.groups.values()],
    }


def _group(group: Group, processes: Processes) -> dict[str, Any]:
    up = processes.answering(group)
    return {
        "name": group.name,
        "phase": str(group.phase),
        "in_flight": len(group.in_flight),
        "capacity": group.capacity,
        "url": up.url if up else None,
        "mode": up.mode if up else None,
        "start_s": up.start_s if up else None,
        "predicted_s": group.predicted_s,
        "fallbacks": fallback.encode(up.fallbacks) if up else [],
        "workers": [_worker(worker, processes) for worker in group.workers],
    }


def _worker(worker: FleetWorker, processes: Processes) -> dict[str, Any]:
    process = processes.get(worker.name)
    fetched = process.fetched if process else None
    return {
        "name": worker.name,
        "server": worker.server,
        "device": worker.device,
        "memory_bytes": worker.memory,
        "ready": worker.ready,
        "fetched_bytes": fetched.size if fetched else None,
        "fetched_s": fetched.seconds if fetched else None,
    }


PREFIX = "coldstart_fleet_"


class FleetStatus(Collector):
    """Collector that reads the status document."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the status document (prometheus_client's Collector)."""
        document = self._status()
        for name, about in (
            ("requests", "Number of requests for a deployed model."),
            ("again", "Number of requests admitted again after their server failed."),
            ("resumed", "Number of admitted-again requests whose stream had begun."),
            ("moved", "Number of streams handed over to another worker."),
        ):
            yield CounterMetricFamily(PREFIX + name, about, document["gateway"][name])
        yield count_refusals(PREFIX, document["gateway"]["refused"])
        hung = CounterMetricFamily(
            f"{PREFIX}servers_hung",
            "Number of servers killed because they made no progress.",
            labels=["model"],
        )
        rows = []
        for model in document["models"]:
            hung.add_metric([model["name"]], model["hung"])
            serving = [one for one in model["groups"] if one["url"] and one["phase"] != GroupPhase.STARTING]
            rows.append({**model, "held": model["waiting"], "groups": len(serving)})
        yield hung
        yield from list_gauges(PREFIX, rows, {**REQUESTS, "groups": "Number of groups that serve the model."})
