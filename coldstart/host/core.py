"""Decisions of the model host, without I/O: `handle(event, now)` returns the actions that follow.

Invariants, after each event: requests go only to a ready model, in order of arrival by model; no model with requests
in flight is ordered to leave its tier; reserved memory never exceeds the machine's memory; the model with the oldest
pending request starts first, and no other model takes the memory that is being freed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from coldstart.host import events, pending
from coldstart.host.events import Action, Event, Failure
from coldstart.host.eviction import evict_excess, free_memory_for
from coldstart.host.model_state import STARTABLE, Model, State
from coldstart.host.pending import PendingRequests
from coldstart.host.residents import Residents
from coldstart.host.specification import REFUSE, HostSettings, ModelSpec


class Core:
    """Models of one machine. `now` is in seconds on one monotonic clock."""

    def __init__(self, specs: Iterable[ModelSpec], settings: HostSettings, template_bytes: int = 0) -> None:
        """`template_bytes` are reserved while the settings require a runtime template."""
        self.residents = Residents(specs, settings, template_bytes)
        self.pending = PendingRequests()
        self.requests = self.hits = self.starts = self.departures = 0
        self._retirement = ""
        self._serving: dict[str, str] = {}
        self._next_check, self._now = -inf, -inf

    @property
    def settings(self) -> HostSettings:
        return self.residents.settings

    @property
    def models(self) -> dict[str, Model]:
        return self.residents.models

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event and return the actions to carry out.

        Raises IllegalTransitionError for an event that its model's state forbids.
        """
        self._now = now
        return [*self._note(event, now), *self._advance(now)]

    def deadline(self) -> float:
        """Return when `Tick` is due at the latest; infinity if nothing depends on time."""
        waits = self.pending.deadline(self._now, self.settings.patience_s, self.settings.hold_s)
        return min(self._next_check, waits)

    def idle_limit(self, model: Model) -> float:
        """Return the seconds without a request after which the model stops; infinity: never."""
        return inf if self.residents.returns(model) or model.spec.idle_s is None else model.spec.idle_s

    def _note(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.Arrived():
                yield from self._arrived(event, now)
            case events.Ended(request):
                self._end_request(request, now)
            case events.Configured(specs, settings, reason):
                self._retirement = reason
                yield from self._configured(specs, settings or self.settings, now)
            case events.Tick():
                pass
            case _ if event.model in self.models:
                yield from self._of_model(event, self.models[event.model], now)

    def _of_model(
        self,
        event: events.Started | events.Failed | events.Left | events.Measured | events.Outdated,
        model: Model,
        now: float,
    ) -> Iterator[Action]:
        match event:
            case events.Started(_, seconds):
                self.residents.ready(model, now, seconds)
            case events.Failed() if model.leaving:
                # The host had already ordered this process to end.
                self.residents.complete_leave(model, now)
            case events.Failed(_, reason, external, hint, code):
                yield from self._failed(model, Failure(reason, hint, code), now, external)
            case events.Left():
                self.residents.complete_leave(model, now)
            case events.Measured(_, memory) if model.state is State.READY:
                self.residents.measured(model, memory)
            case events.Outdated(_, reason) if model.state in (State.READY, State.ASLEEP):
                self.residents.drain(model, model.spec.tiers[-1], now, reason)
        self._watch(model)
        if self.residents.unsettled():
            self._next_check = -inf

    def _arrived(self, event: events.Arrived, now: float) -> Iterator[Action]:
        request, name = event.request, event.model
        self.requests += event.counted
        if (refused := pending.refusal(self.residents, self.pending, request, name, now)) is not None:
            yield refused
            return
        model = self.models[name]
        if event.counted:
            self.hits += model.state is State.READY
            self.residents.requested(model, now)
        self.pending.add(request, name, now)

    def _end_request(self, request: str, now: float) -> None:
        name = self._serving.pop(request, None)
        if name is None:
            self.pending.drop(request)
        elif name in self.models:
            self.models[name].end_request(request, now)
            self._watch(self.models[name])

    def _failed(self, model: Model, reason: Failure, now: float, external: bool) -> Iterator[Action]:
        for request in model.in_flight:
            self._serving.pop(request, None)
        self.residents.failed(model, reason, now, external)
        if model.repeats_start:
            return
        for waiting in self.pending.take(model.spec.name):
            yield pending.failed(model, waiting.request, now)

    def _configured(
        self, specs: tuple[ModelSpec, ...], settings: HostSettings, now: float
    ) -> Iterator[Action]:
        for name in self.residents.configure(specs, settings, now):
            for waiting in self.pending.take(name):
                yield pending.unknown(waiting.request, name)
        self._next_check = -inf

    def _advance(self, now: float) -> Iterator[Action]:
        yield from self._expired(now)
        # Dispatch first: a model with pending requests is not idle.
        yield from self._dispatched()
        if now >= self._next_check:
            self._check(now)
        yield from self._started(now)
        yield from self._ordered()

    def _expired(self, now: float) -> Iterator[Action]:
        while (oldest := self.pending.oldest()) is not None and now >= oldest.since + self.settings.hold_s:
            self.pending.drop(oldest.request)
            yield pending.too_long(oldest, now)

    def _check(self, now: float) -> None:
        """Check all models: idle and retired models, memory above the reservations."""
        self.residents.forget_retired()
        evict_excess(self.residents, now)
        for model in self.models.values():
            if self._due(model) > now:
                continue
            if model.state is not State.FAILED:
                why = self._retirement if model.retired else f"idle for {now - model.since:.0f} s"
                self.residents.drain(model, model.spec.tiers[-1], now, why)
        self._next_check = inf
        for model in self.models.values():
            self._watch(model, after=now)

    def _watch(self, model: Model, after: float = -inf) -> None:
        due = self._due(model)
        if due > after:
            self._next_check = min(self._next_check, due)

    def _due(self, model: Model) -> float:
        """Return when the model's state changes by time alone."""
        if model.retired and model.state in (State.READY, State.ASLEEP):
            return -inf
        if model.state is State.FAILED and (model.repeats_start or self.residents.returns(model)):
            return model.retry_at
        return model.since + self.idle_limit(model) if model.idle else inf

    def _dispatched(self) -> Iterator[Action]:
        for oldest in self.pending.oldest_of_each_model():
            model = self.models[oldest.model]
            if model.state is not State.READY:
                continue
            for waiting in self.pending.take(oldest.model):
                self._serving[waiting.request] = waiting.model
                model.in_flight.add(waiting.request)
                yield events.Dispatch(waiting.request, waiting.model)

    def _started(self, now: float) -> Iterator[Action]:
        own = pending.list_own_starts(self.residents, len(self.pending), now)
        for waiting in [*self.pending.oldest_of_each_model(), *own]:
            model = self.models[waiting.model]
            if model.state not in STARTABLE or now < model.retry_at:
                continue
            if self.residents.starting() >= self.settings.loaders:
                return
            if not self.residents.fits(model):
                for one in self.pending.take(model.spec.name):
                    yield pending.too_large(self.residents, one.request, model)
                continue
            if free_memory_for(self.residents, model, now, now >= waiting.since + self.settings.patience_s):
                self.starts += 1
                yield events.Start(model.spec.name, self.residents.start(model, now))
                self._watch(model)
            elif self.settings.when_full == REFUSE and not self.residents.draining():
                yield from self._refused(model)
            else:
                return

    def _refused(self, model: Model) -> Iterator[Action]:
        for one in list(self.pending.take(model.spec.name)):
            yield pending.full(self.residents, self.pending, one.request, model)

    def _ordered(self) -> Iterator[Action]:
        """Order each draining model without requests in flight into its target tier, once."""
        for model in self.residents.draining():
            if model.leave() and model.target is not None:
                self.departures += 1
                yield events.Leave(model.spec.name, model.target, model.why, model.evicted_for)
