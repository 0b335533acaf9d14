"""Choose models to start without a request, and reject requests.

Pinned models and then the default model start without a request, after the models of all pending requests. A pinned model may
evict idle models. The default model starts only in free memory, while no request is pending or running.
"""

from __future__ import annotations

import re
from math import ceil

from coldstart.host.agenda import Agenda, TrackedRequest
from coldstart.host.events import NO_BUNDLE, Failure, RejectRequest
from coldstart.host.eviction import has_room
from coldstart.host.model_state import STARTABLE, Model, ModelState
from coldstart.host.residents import Residents
from coldstart.units import format_memory


def list_proactive_starts(residents: Residents, pending_count: int, now: float) -> list[TrackedRequest]:
    """Return the models to start without a request, as requests that arrive now and therefore evict no busy model.

    `pending_count` is the number of pending requests.
    """
    names, default = list(residents.pinned), residents.settings.default_model
    if default is not None and pending_count == 0 and _can_start_default(residents, default):
        names.append(default)
    return [TrackedRequest(name, now) for name in names]


def _can_start_default(residents: Residents, default: str) -> bool:
    model = residents.models.get(default)
    if model is None or model.is_retired or model.state not in STARTABLE:
        return False
    changing = residents.count_starting() or residents.list_draining()
    in_use = any(other.in_flight for other in residents.models.values())
    return not changing and not in_use and has_room(residents, model)


MAX_ERROR_CHARS = 120
_PATH_OR_URL = re.compile(r"""\w+://\S+|(?<![\w.])(?:~|\.{1,2})?/[^\s'",:;()]+""")
_SENTENCE_END = re.compile(r"(?<=[.;])\s|\n")


def find_rejection(
    residents: Residents, agenda: Agenda, request: str, name: str, now: float
) -> RejectRequest | None:
    """Return the rejection of a new request, or None if the request is admitted."""
    model = residents.models.get(name)
    if model is None or model.is_retired:
        return reject_unknown(request, name)
    if model.state is ModelState.FAILED and now < model.retry_at and not model.repeats_start:
        return reject_failed(model, request, now)
    if model.state is ModelState.READY:
        return None
    if not residents.fits(model):
        return reject_too_large(residents, request, model)
    if len(agenda.waiting) >= residents.settings.max_held:
        reason = f"the queue is full ({len(agenda.waiting)} waiting)"
        return RejectRequest(request, 429, reason, _estimate_wait_s(residents, agenda, model))
    return None


def reject_unknown(request: str, name: str) -> RejectRequest:
    return RejectRequest(request, 404, f"unknown model {name}: not in this host's configuration")


def reject_too_large(residents: Residents, request: str, model: Model) -> RejectRequest:
    most = format_memory(max(0, residents.find_max_memory(model)))
    wanted = format_memory(model.observed.memory)
    beside = " besides its runtime template" if residents.template_memory() else ""
    return RejectRequest(
        request, 507, f"model {model.spec.name} needs {wanted}, but the host has only {most} for it{beside}"
    )


def reject_failed(model: Model, request: str, now: float) -> RejectRequest:
    """Return the rejection of a request whose model failed to start.

    The client receives a short reason without paths. If no bundle matches, it also receives the difference from the most
    similar bundle and a command that fixes the problem. `log_detail` contains the full error.
    """
    cause = model.failure or Failure("")
    is_missing = cause.code == NO_BUNDLE
    message = _hide_paths(cause.message) if is_missing else shorten_error(cause.message)
    return RejectRequest(
        request,
        503,
        f"model {model.spec.name} did not start: {message}",
        float(ceil(max(1.0, model.retry_at - now))),
        str(cause),
        _hide_paths(cause.hint) if is_missing else "",
    )


def _hide_paths(text: str) -> str:
    return _PATH_OR_URL.sub("<path>", text)


def shorten_error(error: str) -> str:
    """Return the first sentence of an error, without paths and URLs and with at most MAX_ERROR_CHARS characters."""
    sentence = _hide_paths(_SENTENCE_END.split(error.strip(), maxsplit=1)[0]).rstrip(".:; ")
    if len(sentence) <= MAX_ERROR_CHARS:
        return sentence
    return sentence[:MAX_ERROR_CHARS].rsplit(" ", 1)[0] + " ..."


def _estimate_wait_s(residents: Residents, agenda: Agenda, model: Model) -> float:
    """Return the seconds that it takes to start this model and all models with pending requests, one after another."""
    ahead = {waiting.model for waiting in agenda.list_oldest_per_model()} | {model.spec.name}
    waited = (residents.models[name] for name in ahead)
    return float(ceil(max(1.0, sum(one.observed.penalty_s(one.tier) for one in waited))))
