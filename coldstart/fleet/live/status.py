"""Status document of a fleet, for `GET /fleet/status` and `coldstart fleet status`, and the metrics derived from it.

docs/reference/http-api.md describes the document. All sizes are in bytes, and all times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from coldstart.contract import fallback
from coldstart.fleet.core import FleetCore
from coldstart.fleet.groups import Deployment, Group, GroupPhase, GroupWorker
from coldstart.fleet.live.workers import Workers
from coldstart.fleet.roster import FleetServer
from coldstart.host.live.metrics import IN_FLIGHT, REFUSED, StatusMetric

SCHEMA_VERSION = 1


def build_status(
    core: FleetCore, workers: Workers, links: Mapping[str, float], in_flight: Mapping[str, int]
) -> dict[str, Any]:
    """Build the `servers` and `models` fields of the status document.

    Args:
        core: Core of the fleet.
        workers: Worker processes of the fleet.
        links: Measured link speeds of the servers, in bytes per second.
        in_flight: Number of running requests per model.
    """
    models = [model for model in core.models.values() if not model.retired or model.groups]
    hops: dict[str, list[float]] = {}
    for pair, seconds in core.roster.hops.items():
        for server in pair:
            hops.setdefault(server, []).append(seconds)
    return {
        "servers": [_describe_server(server, links, hops) for server in core.roster.servers.values()],
        "models": [
            _describe_model(model, workers) | {"in_flight": in_flight.get(model.spec.name, 0)}
            for model in models
        ],
    }


def _describe_server(
    server: FleetServer, links: Mapping[str, float], hops: Mapping[str, list[float]]
) -> dict[str, Any]:
    return {
        "name": server.spec.name,
        "devices": server.spec.devices,
        "memory_bytes": server.spec.memory,
        "free_bytes": list(server.free),
        "network_bytes_s": server.spec.network,
        "observed_bytes_s": links.get(server.spec.name),
        "hop_s": median(hops[server.spec.name]) if server.spec.name in hops else None,
        "draining": server.draining,
    }


def _describe_model(model: Deployment, workers: Workers) -> dict[str, Any]:
    groups = [_describe_group(group, workers) for group in model.groups.values()]
    return {
        "name": model.spec.name,
        "least": model.spec.least,
        "most": model.spec.most,
        "idle_s": model.spec.idle_s,
        "waiting": len(model.waiting),
        "failures": model.failures,
        "error": model.error if model.failures else "",
        "hung": workers.hung[model.spec.name],
        "serving": sum(bool(one["url"]) and one["phase"] != GroupPhase.STARTING for one in groups),
        "groups": groups,
    }


def _describe_group(group: Group, workers: Workers) -> dict[str, Any]:
    up = workers.find_first_rank(group)
    return {
        "name": group.name,
        "phase": str(group.phase),
        "replaces": group.replaces or None,
        "in_flight": len(group.in_flight),
        "capacity": group.capacity,
        "url": up.url if up else None,
        "mode": up.mode if up else None,
        "start_s": up.start_s if up else None,
        "predicted_s": group.predicted_s,
        "choice": group.choice or None,
        "fallbacks": fallback.encode(up.fallbacks) if up else [],
        "workers": [_describe_worker(worker, workers) for worker in group.workers],
    }


def _describe_worker(worker: GroupWorker, workers: Workers) -> dict[str, Any]:
    process = workers.processes.get(worker.name)
    fetched = process.fetched if process else None
    return {
        "name": worker.name,
        "server": worker.server,
        "device": worker.launch.device,
        "memory_bytes": worker.memory,
        "ready": worker.ready,
        "fetched_bytes": fetched.size if fetched else None,
        "fetched_s": fetched.seconds if fetched else None,
    }


def _create_counter(name: str, about: str) -> StatusMetric:
    return StatusMetric(name, about, f"gateway.{name}", is_counter=True)


METRIC_PREFIX = "coldstart_fleet_"
METRICS = (
    _create_counter("requests", "Number of requests for a deployed model."),
    _create_counter("readmitted", "Number of requests admitted again after their server failed."),
    _create_counter("resumed", "Number of readmitted requests whose stream had begun."),
    _create_counter("migrated", "Number of streams migrated to another worker."),
    _create_counter("migrated_with_kv", "Number of streams migrated together with their KV."),
    _create_counter("migrations_failed", "Number of migrations that failed."),
    _create_counter("refused", REFUSED),
    StatusMetric(
        "servers_hung",
        "Number of servers killed because they made no progress.",
        "models.hung",
        is_counter=True,
    ),
    StatusMetric("model_held", "Number of requests that wait for the model.", "models.waiting"),
    IN_FLIGHT,
    StatusMetric("model_groups", "Number of groups that serve the model.", "models.serving"),
)
