"""Admission of requests: the HTTP status, reason and retry time of each rejected request."""

from __future__ import annotations

import re
from math import ceil

from coldstart.host.events import Refuse
from coldstart.host.model_state import Model, State
from coldstart.host.pending import PendingRequest, PendingRequests
from coldstart.host.residents import Residents
from coldstart.units import format_memory

LONGEST = 120
_WHERE = re.compile(r"""\w+://\S+|(?<![\w.])(?:~|\.{1,2})?/[^\s'",:;()]+""")
# The start of the message of `models.inspection.miss`.
_NO_BUNDLE = "no bundle for "
_END = re.compile(r"(?<=[.;])\s|\s\(hint: |\n")


def refusal(
    residents: Residents, pending: PendingRequests, request: str, name: str, now: float
) -> Refuse | None:
    """Return the rejection of a new request, or None if it is admitted."""
    model = residents.models.get(name)
    if model is None or model.retired:
        return unknown(request, name)
    if model.state is State.FAILED and now < model.retry_at and not model.repeats_start:
        return failed(model, request, now)
    if model.state is State.READY:
        return None
    if not residents.fits(model):
        return too_large(residents, request, model)
    if len(pending) >= residents.settings.max_held:
        reason = f"{len(pending)} requests already wait for models"
        return Refuse(request, 429, reason, _turn(residents, pending, model))
    return None


def unknown(request: str, name: str) -> Refuse:
    return Refuse(request, 404, f"unknown model {name}: not in this host's configuration")


def too_large(residents: Residents, request: str, model: Model) -> Refuse:
    wanted, most = format_memory(model.observed.memory), format_memory(residents.max_memory(model))
    beside = " beside its runtime template" if residents.template_memory() else ""
    return Refuse(request, 507, f"model {model.spec.name} needs {wanted}; the host has {most} for it{beside}")


def failed(model: Model, request: str, now: float) -> Refuse:
    """Return the rejection of a request whose model failed to start, with a short reason; `detail` has the full error."""
    reason = f"model {model.spec.name} did not start: {brief(model.error)}"
    return Refuse(request, 503, reason, float(ceil(max(1.0, model.retry_at - now))), model.error)


def brief(error: str) -> str:
    """Return the first sentence of an error without paths and addresses, at most LONGEST characters.

    The error of a missing bundle remains complete: it names the difference to another bundle and the command that helps.
    """
    if error.startswith(_NO_BUNDLE):
        return _WHERE.sub("<path>", error)
    sentence = _WHERE.sub("<path>", _END.split(error.strip(), maxsplit=1)[0]).rstrip(".:; ")
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0] + " ..."


def too_long(waiting: PendingRequest, now: float) -> Refuse:
    reason = f"model {waiting.model} did not become ready in {now - waiting.since:.0f} s"
    return Refuse(waiting.request, 504, reason)


def full(residents: Residents, pending: PendingRequests, request: str, model: Model) -> Refuse:
    reason = f"no memory for model {model.spec.name}: all others are in use or pinned"
    return Refuse(request, 503, reason, _turn(residents, pending, model))


def _turn(residents: Residents, pending: PendingRequests, model: Model) -> float:
    """Return the seconds until all models with pending requests, and this one, could have started one after another."""
    ahead = {waiting.model for waiting in pending.oldest_of_each_model()} | {model.spec.name}
    waited = (residents.models[name] for name in ahead)
    return float(ceil(max(1.0, sum(one.observed.penalty_s(one.tier) for one in waited))))
