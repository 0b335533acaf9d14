"""Queue of requests whose model is not ready, starts of models without a request, and rejections of requests.

Pinned models and then the default model start without a request, after the models of all pending requests. A pinned model may
evict idle models. The default model starts only in free memory, while no request is pending or running.

Invariant: a request is in the queue at most once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from coldstart.host.events import NO_BUNDLE, Failure, RejectRequest
from coldstart.host.eviction import has_room
from coldstart.host.model_state import STARTABLE, Model, State
from coldstart.host.residents import Residents
from coldstart.units import format_memory


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that has been waiting for its model since the time `since`, in seconds."""

    request: str
    model: str
    since: float


class PendingRequests:
    """Queue of the pending requests of all models."""

    def __init__(self) -> None:
        self._all: dict[str, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: str) -> bool:
        return request in self._all

    def add(self, request: str, model: str, now: float) -> None:
        self._all[request] = PendingRequest(request, model, now)

    def drop(self, request: str) -> None:
        self._all.pop(request, None)

    def oldest(self) -> PendingRequest | None:
        return next(iter(self._all.values()), None)

    def oldest_of_each_model(self) -> list[PendingRequest]:
        """Return the oldest pending request of each model, in order of arrival."""
        first: dict[str, PendingRequest] = {}
        for pending in self._all.values():
            first.setdefault(pending.model, pending)
        return list(first.values())

    def deadline(self, now: float, patience_s: float, hold_s: float) -> float:
        """Return when the next request expires (`hold_s`) or may evict busy models (`patience_s`), or infinity if none does."""
        oldest = self.oldest()
        if oldest is None:
            return inf
        runs_out = (waiting.since + patience_s for waiting in self.oldest_of_each_model())
        return min([oldest.since + hold_s, *(time for time in runs_out if time > now)])

    def count_by_model(self) -> dict[str, int]:
        """Return the number of pending requests of each model."""
        return Counter(pending.model for pending in self._all.values())

    def take(self, model: str) -> Iterator[PendingRequest]:
        """Remove and yield the pending requests of `model`, oldest first."""
        for pending in [one for one in self._all.values() if one.model == model]:
            yield self._all.pop(pending.request)


def list_proactive_starts(residents: Residents, pending_count: int, now: float) -> list[PendingRequest]:
    """Return the models to start without a request, as requests that arrive now, so that no busy model is evicted for them.

    `pending_count` is the number of pending requests.
    """
    names, default = list(residents.pinned), residents.settings.default_model
    if default is not None and pending_count == 0 and _can_start_default(residents, default):
        names.append(default)
    return [PendingRequest("", name, now) for name in names]


def _can_start_default(residents: Residents, default: str) -> bool:
    model = residents.models.get(default)
    if model is None or model.retired or model.state not in STARTABLE:
        return False
    changing = residents.count_starting() or residents.list_draining()
    in_use = any(other.in_flight for other in residents.models.values())
    return not changing and not in_use and has_room(residents, model)


MAX_ERROR_CHARS = 120
_PATH_OR_URL = re.compile(r"""\w+://\S+|(?<![\w.])(?:~|\.{1,2})?/[^\s'",:;()]+""")
_SENTENCE_END = re.compile(r"(?<=[.;])\s|\n")


def find_rejection(
    residents: Residents, pending: PendingRequests, request: str, name: str, now: float
) -> RejectRequest | None:
    """Return the rejection of a new request, or None if the request is admitted."""
    model = residents.models.get(name)
    if model is None or model.retired:
        return reject_unknown(request, name)
    if model.state is State.FAILED and now < model.retry_at and not model.repeats_start:
        return reject_failed(model, request, now)
    if model.state is State.READY:
        return None
    if not residents.fits(model):
        return reject_too_large(residents, request, model)
    if len(pending) >= residents.settings.max_held:
        reason = f"{len(pending)} requests already wait for models"
        return RejectRequest(request, 429, reason, _estimate_wait_s(residents, pending, model))
    return None


def reject_unknown(request: str, name: str) -> RejectRequest:
    return RejectRequest(request, 404, f"unknown model {name}: not in this host's configuration")


def reject_too_large(residents: Residents, request: str, model: Model) -> RejectRequest:
    wanted, most = format_memory(model.observed.memory), format_memory(residents.find_max_memory(model))
    beside = " beside its runtime template" if residents.template_memory() else ""
    return RejectRequest(
        request, 507, f"model {model.spec.name} needs {wanted}, but the host has only {most} for it{beside}"
    )


def reject_failed(model: Model, request: str, now: float) -> RejectRequest:
    """Return the rejection of a request whose model failed to start.

    The client receives a short reason without paths. If no bundle matches, it also receives the difference from another
    bundle and a command that helps. `detail` contains the full error.
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
    return (
        sentence
        if len(sentence) <= MAX_ERROR_CHARS
        else sentence[:MAX_ERROR_CHARS].rsplit(" ", 1)[0] + " ..."
    )


def reject_expired(waiting: PendingRequest, now: float) -> RejectRequest:
    reason = f"model {waiting.model} did not become ready within {now - waiting.since:.0f} s"
    return RejectRequest(waiting.request, 504, reason)


def reject_without_memory(
    residents: Residents, pending: PendingRequests, request: str, model: Model
) -> RejectRequest:
    reason = f"no memory for model {model.spec.name}: all other models are in use or pinned"
    return RejectRequest(request, 503, reason, _estimate_wait_s(residents, pending, model))


def _estimate_wait_s(residents: Residents, pending: PendingRequests, model: Model) -> float:
    """Return the seconds that it takes to start this model and all models with pending requests, one after another."""
    ahead = {waiting.model for waiting in pending.oldest_of_each_model()} | {model.spec.name}
    waited = (residents.models[name] for name in ahead)
    return float(ceil(max(1.0, sum(one.observed.penalty_s(one.tier) for one in waited))))
