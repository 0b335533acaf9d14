"""What a fleet says of itself: the document of `GET /fleet/status` and of `coldstart fleet status`.

    schema_version    1; members may be added, none goes or changes its meaning within a version
    gateway           url, pid, version, uptime_s, requests, in_flight, held, refused: {HTTP status: count},
                      again (requests taken in anew), resumed (of these: streams that had begun), moved (streams handed over)
    controller        null while it cannot be reached, else: incarnation, pid, uptime_s, starts (groups), gateways, held
    servers           each: name, devices, memory_bytes (of a device), free_bytes: [...], network_bytes_s (as given), draining,
                      observed_bytes_s (of fetches that had the link to themselves; null: none yet)
    unusable          servers whose node is there and that cannot be used: their reasons by their names
    models            each: name, least, most, idle_s, waiting, failures, error,
                      groups: each: name, phase (starting | serving | leaving), in_flight, capacity, url, mode, start_s,
                      predicted_s (until the first token, by the decision to start; null for one that was found),
                      fallbacks: [...], as a server's ready file has them,
                      workers: each: name, server, device, memory_bytes, ready,
                      fetched_bytes, fetched_s (null where it fetches still, or nothing)

Servers and models are the controller's, as last known where it cannot be reached. All bytes are bytes, all times seconds.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from coldstart.contract import fallback
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.groups import FleetWorker, Group

if TYPE_CHECKING:
    from coldstart.cluster.control import FleetControl

SCHEMA_VERSION = 1


def controlled(control: FleetControl) -> dict[str, Any]:
    """The controller's part."""
    core = control.core
    return {
        "controller": {
            "incarnation": control.incarnation,
            "pid": os.getpid(),
            "uptime_s": control.clock() - control.began,
            "starts": core.starts,
            "gateways": len(control.desks.desks),
            "held": core.held,
        },
        "servers": [
            {
                "name": server.spec.name,
                "devices": server.spec.devices,
                "memory_bytes": server.spec.memory,
                "free_bytes": list(server.free),
                "network_bytes_s": server.spec.network,
                "observed_bytes_s": control.state.links.get(server.spec.name),
                "draining": server.draining,
            }
            for server in core.roster.cluster.servers.values()
        ],
        "unusable": dict(control.unusable),
        "models": [
            _model(control, model) for model in core.models.values() if not model.retired or model.groups
        ],
    }


def _model(control: FleetControl, model: Deployment) -> dict[str, Any]:
    return {
        "name": model.spec.name,
        "least": model.spec.least,
        "most": model.spec.most,
        "idle_s": model.spec.idle_s,
        "waiting": len(model.waiting),
        "failures": model.failures,
        "error": model.error if model.failures else "",
        "groups": [_group(control, group) for group in model.groups.values()],
    }


def _group(control: FleetControl, group: Group) -> dict[str, Any]:
    up = control.workers.answering(group)
    return {
        "name": group.name,
        "phase": str(group.phase),
        "in_flight": len(group.in_flight),
        "capacity": group.capacity,
        "url": up.url if up else None,
        "mode": up.mode if up else None,
        "start_s": up.start_s if up else None,
        "predicted_s": group.predicted_s,
        "fallbacks": fallback.to_json(up.fallbacks) if up else [],
        "workers": [_worker(control, worker) for worker in group.workers],
    }


def _worker(control: FleetControl, worker: FleetWorker) -> dict[str, Any]:
    fetched = control.workers.fetched.get(worker.name)
    return {
        "name": worker.name,
        "server": worker.server,
        "device": worker.device,
        "memory_bytes": worker.memory,
        "ready": worker.ready,
        "fetched_bytes": fetched.size if fetched else None,
        "fetched_s": fetched.seconds if fetched else None,
    }
