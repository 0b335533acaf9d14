"""Status document of a host, for `GET /status`, `coldstart host status` and the page at /ui, and the progress of a start.

docs/reference/http-api.md describes every field. Within a schema version, fields can be added but not removed or changed.
Sizes are in bytes and times in seconds. This module does no I/O: the driver of the live host supplies the facts that the
core does not know.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isinf
from typing import Any

from coldstart.host.core import Core
from coldstart.host.model_state import Model, ModelState
from coldstart.system.start_progress import StartProgress

# Upper limit of the fraction while a start is taking longer than estimated.
_MAX_ESTIMATE = 0.99


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a model for which a request is waiting.

    `fraction` is the completed part of the start, from 0 to 1. `eta_s` is the estimated time in seconds until the model is
    ready. `step` is the progress that the starting server reported, as a JSON object. A field that is None is unknown.
    """

    model: str
    state: str
    fraction: float | None = None
    eta_s: float | None = None
    step: Mapping[str, Any] | None = None

    def encode(self) -> str:
        """Return the progress as one line of JSON."""
        return json.dumps(asdict(self))


def estimate_progress(model: Model, now: float, reported: StartProgress | None = None) -> Progress:
    """Return the progress of a model at time `now`. `reported` is the progress that its starting server reported."""
    name, state = model.spec.name, str(model.state)
    step = reported.build_document() if reported else None
    if model.state is ModelState.READY:
        return Progress(name, state, 1.0, 0.0)
    if model.state is not ModelState.STARTING:
        # The time until other models finish their requests is unknown.
        return Progress(name, state, 0.0)
    passed, total = now - (model.state_since or 0.0), model.observed.penalty_s(model.tier)
    if passed >= total:
        return Progress(name, state, _MAX_ESTIMATE, step=step)
    return Progress(name, state, round(min(_MAX_ESTIMATE, passed / total), 3), round(total - passed, 1), step)


SCHEMA_VERSION = 1
RECENT = 100


@dataclass(slots=True)
class ModelFacts:
    """Facts about one model that the core does not know. They are fields of the model in the status document."""

    aliases: Sequence[str] = ()
    adapters: Sequence[str] = ()
    requests: int = 0
    hits: int = 0
    starts: int = 0
    chunks_streamed: int = 0
    next_prewarm_unix_s: float | None = None
    mode: str | None = None
    pid: int | None = None
    gpu_memory_bytes: int | None = None
    progress: StartProgress | None = None
    last_start: Mapping[str, Any] | None = None


@dataclass(slots=True)
class HostFacts:
    """Facts about the host that the core does not know. `began` is the host's start time, in seconds on the core's clock.

    `total_start_s` is the total duration of all successful starts in seconds.
    """

    url: str = ""
    pid: int = 0
    version: str = ""
    began: float = 0.0
    stopping: bool = False
    config_path: str | None = None
    config_loaded_unix_s: float = 0.0
    config_error: str = ""
    client_keys_error: str = ""
    template_error: str = ""
    failed_starts: int = 0
    total_start_s: float = 0.0
    refused: Counter[int] = field(default_factory=Counter)
    recent_starts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
    models: dict[str, ModelFacts] = field(default_factory=dict)

    def get_model(self, model: str) -> ModelFacts:
        """Return the facts of a model, creating them on first use."""
        return self.models.setdefault(model, ModelFacts())


def build_status(core: Core, facts: HostFacts, now: float, unix_s: float) -> dict[str, Any]:
    """Build the status document. The current time is `now` on the core's clock and `unix_s` in Unix time, in seconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "time_unix_s": unix_s,
        "host": _describe_host(core, facts, now),
        "requests": {
            "total": core.requests,
            "hits": core.hits,
            "hit_ratio": _ratio(core.hits, core.requests),
            "held": len(core.agenda.waiting),
            "in_flight": sum(len(model.in_flight) for model in core.models.values()),
            "refused": {str(status): count for status, count in sorted(facts.refused.items())},
        },
        "starts": {
            "total": core.starts,
            "failed": facts.failed_starts,
            "seconds": facts.total_start_s,
            "departures": core.departures,
        },
        "recent_starts": list(facts.recent_starts),
        "models": [
            _describe_model(core, model, facts.get_model(name), now, facts.began)
            for name, model in core.models.items()
        ],
    }


def _describe_host(core: Core, facts: HostFacts, now: float) -> dict[str, Any]:
    settings, residents = core.settings, core.residents
    return {
        "url": facts.url,
        "pid": facts.pid,
        "version": facts.version,
        "uptime_s": now - facts.began,
        "stopping": facts.stopping,
        "policy": settings.policy,
        "memory_bytes": residents.device.capacity,
        "memory_used_bytes": residents.device.used,
        "runtime_template_bytes": residents.template_memory(),
        "runtime_template_error": facts.template_error,
        "host_memory_bytes": residents.host_memory.capacity,
        "host_memory_used_bytes": residents.host_memory.used,
        "max_held": settings.max_held,
        "loaders": settings.loaders,
        "max_residents": settings.max_residents,
        "default_model": settings.default_model,
        "config": {
            "path": facts.config_path,
            "loaded_unix_s": facts.config_loaded_unix_s,
            "error": facts.config_error,
        },
        "client_keys_error": facts.client_keys_error,
    }


def _describe_model(core: Core, model: Model, facts: ModelFacts, now: float, began: float) -> dict[str, Any]:
    failed, known = (
        model.state is ModelState.FAILED,
        {one.name: getattr(facts, one.name) for one in fields(facts)},
    )
    if facts.gpu_memory_bytes is None:
        del known["gpu_memory_bytes"]
    return {
        **known,
        "name": model.spec.name,
        "state": str(model.state),
        "progress": facts.progress.build_document() if facts.progress else None,
        "tier": model.tier.name,
        "pinned": model.spec.pinned,
        "retired": model.is_retired,
        "memory_bytes": model.observed.memory,
        "memory_source": model.observed.source,
        "held_bytes": core.residents.device.reserved_bytes(model.spec.name),
        "penalty_s": {tier.name: model.observed.penalty_s(tier) for tier in model.spec.tiers},
        "held": len(model.waiting),
        "in_flight": len(model.in_flight),
        "hit_ratio": _ratio(facts.hits, facts.requests),
        "failures": model.consecutive_failures,
        "error": model.error,
        "retry_in_s": max(0.0, model.retry_at - now) if failed and model.retry_at > now else None,
        "since_s": max(0.0, now - (began if model.state_since is None else model.state_since)),
        "idle_s": None if isinf(idle := core.idle_limit(model)) else idle,
        "prewarm": model.spec.prewarm,
    }


def _ratio(hits: int, requests: int) -> float | None:
    return hits / requests if requests else None
