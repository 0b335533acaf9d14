"""Which requests are refused, with what status, and when to come again."""

from __future__ import annotations

import re
from math import ceil

from coldstart.host.events import Refuse
from coldstart.host.model_state import Model, State
from coldstart.host.pending import PendingRequest, PendingRequests
from coldstart.host.residents import Residents

GIB = 1 << 30
LONGEST = 120
_WHERE = re.compile(r"""\w+://\S+|(?<![\w.])(?:~|\.{1,2})?/[^\s'",:;()]+""")
_END = re.compile(r"(?<=[.;])\s|\s\(hint: |\n")


def refusal(
    residents: Residents, pending: PendingRequests, request: str, name: str, now: float
) -> Refuse | None:
    """Why this new request is not taken, if it is not."""
    model = residents.models.get(name)
    if model is None or model.retired:
        return unknown(request, name)
    if model.state is State.FAILED and now < model.retry_at:
        return failed(model, request, now)
    if model.state is State.READY:
        return None
    if residents.most_for(model) < model.observed.memory:
        return too_large(residents, request, model)
    if len(pending) >= residents.settings.max_held:
        reason = f"{len(pending)} requests wait for models already"
        return Refuse(request, 429, reason, _turn(residents, pending, model))
    return None


def unknown(request: str, name: str) -> Refuse:
    return Refuse(request, 404, f"model {name} is not one of this host's")


def too_large(residents: Residents, request: str, model: Model) -> Refuse:
    wanted, most = model.observed.memory / GIB, residents.most_for(model) / GIB
    return Refuse(
        request, 507, f"model {model.spec.name} needs {wanted:.2f} GiB; the host has {most:.2f} GiB for it"
    )


def failed(model: Model, request: str, now: float) -> Refuse:
    """Why it did not start, to nobody but those who asked for it: in brief, the whole is the log's."""
    reason = f"model {model.spec.name} did not start: {brief(model.error)}"
    return Refuse(request, 503, reason, float(ceil(max(1.0, model.retry_at - now))), model.error)


def brief(error: str) -> str:
    """The first sentence of an error without paths and addresses, at most LONGEST characters."""
    sentence = _WHERE.sub("<path>", _END.split(error.strip(), maxsplit=1)[0]).rstrip(".:; ")
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0] + " ..."


def too_long(waiting: PendingRequest, now: float) -> Refuse:
    reason = f"model {waiting.model} did not become ready in {now - waiting.since:.0f} s"
    return Refuse(waiting.request, 504, reason)


def full(residents: Residents, pending: PendingRequests, request: str, model: Model) -> Refuse:
    reason = f"no memory for model {model.spec.name}: all others are in use or pinned"
    return Refuse(request, 503, reason, _turn(residents, pending, model))


def _turn(residents: Residents, pending: PendingRequests, model: Model) -> float:
    """Seconds until the models that are waited for, and this one, could have started in turn."""
    ahead = {waiting.model for waiting in pending.oldest_of_each_model()} | {model.spec.name}
    waited = (residents.models[name] for name in ahead)
    return float(ceil(max(1.0, sum(one.observed.penalty_s(one.tier) for one in waited))))
