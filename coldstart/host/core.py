"""Scheduling decisions of the model host, without I/O.

Invariants after each event: requests are dispatched only to ready models, in order of arrival for each model. A model with
requests in flight never changes its tier. Reserved memory never exceeds the host's memory. The model of the oldest pending
request starts first, and memory that is being freed for it is not allocated to any other model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from coldstart.host import admission, events
from coldstart.host.agenda import Agenda
from coldstart.host.events import Action, Event, Failure, ModelEvent
from coldstart.host.eviction import evict_excess, free_memory_for
from coldstart.host.model_state import STARTABLE, Model, ModelState
from coldstart.host.residents import Residents
from coldstart.host.specification import HostSettings, ModelSpec

CHECK = "check"
"""Timers at which a model may have to be stopped or restarted without an event."""


class Core:
    """Scheduler that decides which models of a host run. All times are in seconds on one monotonic clock."""

    def __init__(self, specs: Iterable[ModelSpec], settings: HostSettings, template_bytes: int = 0) -> None:
        """Create the core, and reserve `template_bytes` bytes of memory if the settings require a runtime template."""
        self.residents = Residents(specs, settings, template_bytes)
        self.agenda = Agenda(self.residents.models, settings.hold_s)
        self.requests = self.hits = self.starts = self.departures = 0
        self._retirement_reason = ""
        self._checks: dict[str, float] = {}
        self._is_unsettled, self._now = True, -inf

    @property
    def settings(self) -> HostSettings:
        return self.residents.settings

    @property
    def models(self) -> dict[str, Model]:
        return self.residents.models

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event that occurs at time `now`, and return the actions that the caller must execute.

        Raises:
            IllegalTransitionError: The state of the model does not allow this event.
        """
        self._now = now
        return [*self._process_event(event, now), *self._advance(now)]

    def deadline(self) -> float:
        """Return the time by which the core must receive a `Tick`, or infinity if it waits for no timer.

        Before the first event, the time is minus infinity, because some models start without a request.
        """
        if self._is_unsettled:
            return -inf
        runs_out = (one.arrived_at + self.settings.patience_s for one in self.agenda.list_oldest_per_model())
        return min([self.agenda.deadline(), *(time for time in runs_out if time > self._now)])

    def idle_limit(self, model: Model) -> float:
        """Return the idle time in seconds after which the model stops, or infinity if it never stops when idle."""
        if self.residents.restarts_by_itself(model) or model.spec.idle_s is None:
            return inf
        return model.spec.idle_s

    def _process_event(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.RequestArrived():
                yield from self._admit_request(event, now)
            case events.RequestEnded(request):
                self._end_request(request, now)
            case events.ConfigurationChanged(specs, settings, reason):
                self._retirement_reason = reason
                yield from self._change_configuration(specs, settings or self.settings, now)
            case events.Tick():
                pass
            case _ if event.model in self.models:
                yield from self._process_model_event(event, self.models[event.model], now)

    def _process_model_event(self, event: ModelEvent, model: Model, now: float) -> Iterator[Action]:
        match event:
            case events.ModelReady(_, seconds):
                self.residents.record_ready(model, now, seconds)
            case events.ModelFailed() if (
                model.is_tier_change_ordered and model.drain_target is model.spec.tiers[-1]
            ):
                # The host had already ordered this process to end.
                self.residents.complete_tier_change(model, now)
            case events.ModelFailed(_, reason, external, hint, code):
                yield from self._fail_model(model, Failure(reason, hint, code), now, external)
            case events.TierChanged():
                self.residents.complete_tier_change(model, now)
            case events.MemoryMeasured(_, memory) if model.state is ModelState.READY:
                self.residents.record_memory(model, memory)
            case events.ServerOutdated(_, reason, True) if self._can_replace(model):
                self.residents.reserve_replacement(model)
                yield events.ReplaceServer(model.spec.name, reason)
            case events.ServerOutdated(_, reason) if model.state in (ModelState.READY, ModelState.ASLEEP):
                self.residents.drain(model, model.spec.tiers[-1], now, reason)
            case events.ReplacementEnded() if model.replacement_bytes:
                self.residents.release_replacement(model)
        self._schedule_check(model)
        self._is_unsettled = True

    def _can_replace(self, model: Model) -> bool:
        """Return whether a second server of a model in use may start. A model that is not in use stops instead."""
        return (
            model.state is ModelState.READY
            and not model.replacement_bytes
            and (bool(model.in_flight) or self.residents.restarts_by_itself(model))
            and not self.agenda.waiting  # free memory is for the models of waiting requests
            and self.residents.has_room_for_second(model)
        )

    def _admit_request(self, event: events.RequestArrived, now: float) -> Iterator[Action]:
        request, name = event.request, event.model
        self.requests += event.is_client_request
        if (refused := admission.find_rejection(self.residents, self.agenda, request, name, now)) is not None:
            yield refused
            return
        model = self.models[name]
        if event.is_client_request:
            self.hits += model.state is ModelState.READY
            self.residents.record_request(model, now)
        self.agenda.enqueue_request(request, name, now)

    def _end_request(self, request: str, now: float) -> None:
        if request not in self.agenda.open:
            return
        known = self.agenda.remove_request(request)
        if (model := self.models.get(known.group or "")) is not None:
            model.end_request(request, now)
            self._schedule_check(model)

    def _fail_model(self, model: Model, reason: Failure, now: float, external: bool) -> Iterator[Action]:
        for request in model.in_flight:
            self.agenda.remove_request(request)
        self.residents.record_failure(model, reason, now, external)
        if model.repeats_start:
            return
        for request in self._take_waiting(model):
            yield admission.reject_failed(model, request, now)

    def _change_configuration(
        self, specs: tuple[ModelSpec, ...], settings: HostSettings, now: float
    ) -> Iterator[Action]:
        for name in self.residents.configure(specs, settings, now):
            for request in self._take_waiting(self.models[name]):
                yield admission.reject_unknown(request, name)
        self.agenda.hold_s, self._is_unsettled = settings.hold_s, True
        for model in self.models.values():
            self._schedule_check(model)

    def _take_waiting(self, model: Model) -> list[str]:
        """Remove the requests that wait for a model, and return their names, oldest first."""
        requests = list(model.waiting)
        for request in requests:
            self.agenda.remove_request(request)
        return requests

    def _advance(self, now: float) -> Iterator[Action]:
        yield from self.agenda.reject_expired(now)
        # Dispatch first: a model with pending requests is not idle.
        yield from self._dispatch_requests()
        due = [name for _, name in self.agenda.pop_due_timers(now)]
        if due or self._is_unsettled:
            self._settle(now)
        for name in due:
            self._check_model(name, now)
        yield from self._start_models(now)
        yield from self._order_tier_changes()

    def _settle(self, now: float) -> None:
        """Delete stopped retired models, drain other retired models, and evict models if they use more than the capacity."""
        self._is_unsettled = False
        self.residents.delete_retired()
        evict_excess(self.residents, now)
        for model in self.models.values():
            if model.is_retired and model.state in (ModelState.READY, ModelState.ASLEEP):
                self.residents.drain(model, model.spec.tiers[-1], now, self._retirement_reason)

    def _check_model(self, name: str, now: float) -> None:
        self._checks.pop(name, None)
        if (model := self.models.get(name)) is None:
            return
        if now < self._find_due_time(model):
            self._schedule_check(model)
        elif model.is_idle:
            why = f"idle for {now - model.idle_since:.0f} s"
            self.residents.drain(model, model.spec.tiers[-1], now, why)

    def _schedule_check(self, model: Model) -> None:
        """Schedule a check of a model at its due time, unless a check that is due earlier is already scheduled."""
        due, name = self._find_due_time(model), model.spec.name
        if due < self._checks.get(name, inf):
            self._checks[name] = due
            self.agenda.add_timer(due, CHECK, name)

    def _find_due_time(self, model: Model) -> float:
        """Return the time at which the model must be stopped or restarted if no event occurs, or infinity if never."""
        if model.state is ModelState.FAILED and (
            model.repeats_start or self.residents.restarts_by_itself(model)
        ):
            return model.retry_at
        return model.idle_since + self.idle_limit(model) if model.is_idle else inf

    def _dispatch_requests(self) -> Iterator[Action]:
        for oldest in self.agenda.list_oldest_per_model():
            model = self.models[oldest.model]
            if model.state is not ModelState.READY:
                continue
            for request in list(model.waiting):
                self.agenda.assign_request(request, oldest.model)
                model.in_flight.add(request)
                yield events.DispatchRequest(request, oldest.model)

    def _start_models(self, now: float) -> Iterator[Action]:
        own = admission.list_proactive_starts(self.residents, len(self.agenda.waiting), now)
        for waiting in [*self.agenda.list_oldest_per_model(), *own]:
            model = self.models[waiting.model]
            if model.state not in STARTABLE or now < model.retry_at:
                continue
            if self.residents.count_starting() >= self.settings.loaders:
                return
            if not self.residents.fits(model):
                for request in self._take_waiting(model):
                    yield admission.reject_too_large(self.residents, request, model)
                continue
            if free_memory_for(
                self.residents, model, now, now >= waiting.arrived_at + self.settings.patience_s
            ):
                self.starts += 1
                yield events.StartModel(model.spec.name, self.residents.start(model, now))
            else:
                return

    def _order_tier_changes(self) -> Iterator[Action]:
        for model in self.residents.list_draining():
            if model.order_tier_change() and model.drain_target is not None:
                self.departures += 1
                yield events.ChangeTier(
                    model.spec.name, model.drain_target, model.drain_reason, model.evicted_for
                )
