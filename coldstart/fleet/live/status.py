"""Status document of a fleet, for `GET /fleet/status` and `coldstart fleet status`.

schema_version    1; members may be added, none is removed or changes its meaning within a version
gateway           url, pid, version, uptime_s, starts (groups), requests, in_flight, held, refused: {HTTP status: count},
                  again (requests admitted again), resumed (of these: streams that had begun), moved (streams),
                  client_keys_error: why the current client key file is not used; empty if it is, or without one
servers           each: name, devices, memory_bytes (of a device), free_bytes: [...], network_bytes_s (as given), draining,
                  observed_bytes_s (of fetches that used the link alone; null: none yet)
unusable          {name: reason} of servers whose node is alive but that cannot be used
models            each: name, least, most, idle_s, waiting, failures, error,
                  groups: each: name, phase (starting / serving / leaving), in_flight, capacity, url, mode, start_s,
                  predicted_s (until the first token, predicted at launch; null for a group found at the beginning),
                  fallbacks: [...], as in a server's ready file,
                  workers: each: name, server, device, memory_bytes, ready,
                  fetched_bytes, fetched_s (null while it fetches, or if it fetched nothing).

All sizes are in bytes, all times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coldstart.contract import fallback
from coldstart.fleet.cluster import FleetServer
from coldstart.fleet.core import FleetCore
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.groups import FleetWorker, Group
from coldstart.fleet.live.workers import Processes

SCHEMA_VERSION = 1


def fleet_status(core: FleetCore, processes: Processes, links: Mapping[str, float]) -> dict[str, Any]:
    """Return the members `servers` and `models` of the status document; `links` are measured speeds in bytes/s."""
    models = [model for model in core.models.values() if not model.retired or model.groups]
    return {
        "servers": [_server(server, links) for server in core.roster.cluster.servers.values()],
        "models": [_model(model, processes) for model in models],
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
    fetched = processes.fetched.get(worker.name)
    return {
        "name": worker.name,
        "server": worker.server,
        "device": worker.device,
        "memory_bytes": worker.memory,
        "ready": worker.ready,
        "fetched_bytes": fetched.size if fetched else None,
        "fetched_s": fetched.seconds if fetched else None,
    }
