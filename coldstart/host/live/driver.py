"""The live host's driver: it admits requests, sends events to the core, and executes the core's actions.

All code runs on one event loop, so the core processes one event at a time. A model with a cron expression starts on that
schedule. The wall clock can jump and a machine can sleep, so the clock is read at least every CHECK_S seconds, and a
scheduled start that is more than LATE_S seconds late is reported as missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from math import inf

from coldstart.host import events, status
from coldstart.host.configuration import HostFile, find_next_moment
from coldstart.host.core import Core
from coldstart.host.events import Action, Event
from coldstart.host.live.lifecycle import STOPPING, LocalReplica, ServerLifecycle
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import EventRecorder
from coldstart.host.live.moves import Moves
from coldstart.host.live.profiles import MemoryMeter
from coldstart.host.live.request_router import (
    AdmissionRefusedError,
    RequestRouter,
    Ticket,
    build_unknown_model_error,
)
from coldstart.host.live.servers import ServerStarter
from coldstart.host.live.upstream import AbortedError, NothingSentError, Replica
from coldstart.host.model_state import ModelState
from coldstart.host.status import Progress, estimate_progress
from coldstart.system.start_progress import StartProgress

CHECK_S = 20.0
LATE_S = 60.0


class PrewarmSchedule:
    """Schedule of model starts by cron expression.

    `prewarm` is called with the name of each model that is due. `miss` is called with the name of a model whose scheduled
    start was missed, and the reason.
    """

    def __init__(
        self,
        prewarm: Callable[[str], None],
        miss: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._prewarm, self._miss, self._now = prewarm, miss, now
        self._crontabs: dict[str, str] = {}
        self._next: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, crontabs: Mapping[str, str]) -> None:
        """Apply the cron expressions of the models. A start that is due under an unchanged expression is not lost."""
        known = self._crontabs
        self._next = {model: at for model, at in self._next.items() if crontabs.get(model) == known[model]}
        self._crontabs = dict(crontabs)
        self.start_due_models()

    def get_next_start(self, model: str) -> float | None:
        """Return the Unix time of the model's next scheduled start, or None if it has no schedule."""
        return self._next.get(model)

    def start_due_models(self) -> None:
        """Start the models that are due, and set a timer for the next check.

        All start times are computed again, because the clock may have been changed.
        """
        now = self._now()
        for model, at in self._next.items():
            if at <= now - LATE_S:
                self._miss(
                    model, f"the scheduled time passed {now - at:.0f} s ago while the host was not running"
                )
            elif at <= now:
                self._prewarm(model)
        self._next = {model: find_next_moment(one, now) for model, one in self._crontabs.items()}
        if self._timer is not None:
            self._timer.cancel()
        due_s = min(self._next.values(), default=inf) - now
        timer = asyncio.get_running_loop().call_later
        self._timer = timer(min(CHECK_S, max(0.0, due_s)), self.start_due_models) if self._next else None


END_S = 10.0
"""Seconds within which a server must exit after its connections were lost."""
LOOK_S = 0.02


class Driver(RequestRouter):
    """Driver of one model host, which connects the core to requests, servers and timers."""

    stopping_reason = STOPPING

    def __init__(
        self,
        file: HostFile,
        servers: ServerStarter,
        *,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: MemoryMeter | None = None,
        template_bytes: int = 0,
    ) -> None:
        super().__init__(file.catalogue, log or Log(quiet=True), clock)
        self.core = Core(file.models, file.settings, template_bytes)
        self.record = EventRecorder(self.log, self.facts, self.status)
        self.metrics = self.record.metrics
        self.lifecycle = ServerLifecycle(
            self.core,
            file.catalogue.launches,
            servers,
            record=self.record,
            emit=self.emit,
            clock=clock,
            meter=meter or MemoryMeter(),
            move_requests=self._move_requests,
        )
        self.moves = Moves(self._tickets, lambda _request, _moved: None, clock, self.log)
        self._end_move = self.moves.end_move
        self._crontabs = file.crontabs
        self.schedule = PrewarmSchedule(self._prewarm, self.record.record_missed_prewarming)
        self.record.register_models(file)

    @property
    def resumes_streams(self) -> bool:  # type: ignore[override]
        """Return whether a stream whose server exits continues on the next server of its model."""
        return self.core.settings.resume_streams

    async def readmit_request(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Admit a request again, or return None if that is unsafe.

        It is safe if the next server can continue the stream, or if the server aborted or never received the request. A
        request is not retried if its connection was lost before the response began, because the request may have crashed
        the server. Each request is retried at most once: if a second server fails, the request may be the cause. If only the
        target of a migration failed, return the same ticket, whose request continues at its current server.
        """
        if self.moves.roll_back(ticket, str(error)):
            return ticket
        has_begun = ticket.continuation is not None and bool(ticket.continuation.tokens)
        harmless = isinstance(error, (AbortedError, NothingSentError))
        is_resumable = (has_begun or harmless) and not ticket.earlier_tries
        if self.facts.stopping or not is_resumable or not await self._await_end(replica):
            return None
        made = len(ticket.continuation.tokens) if ticket.continuation else 0
        self.log.write("again", model=replica.name, made=made)
        self.end_request(ticket)
        tries = ticket.earlier_tries + 1
        return self._admit(ticket.destination, is_client_request=False, earlier_tries=tries)

    async def _move_requests(self, replaced: LocalReplica, replica: LocalReplica) -> None:
        """Move the streams of a replaced server to the next one if the weights are the same, and wait until all have ended."""
        before, weights = (one.ready.document.get("weights") for one in (replaced, replica))
        if self.resumes_streams and weights and weights == before:
            for ticket in list(self._tickets.values()):
                if ticket.target is replaced:
                    self.moves.schedule_move(ticket, replica)
        while any(ticket.target is replaced for ticket in self._tickets.values()):
            await asyncio.sleep(LOOK_S)

    async def _await_end(self, replica: Replica) -> bool:
        """Wait until `replica` has exited and its model can start again. Return whether that happens within END_S seconds."""
        name, deadline = replica.name, self.clock() + END_S
        while (now := self.clock()) <= deadline:
            model, server = self.core.models.get(name), self.lifecycle.replicas.get(name)
            # Without a server, the core may not have processed its exit yet, or the model is in backoff after a failure.
            can_start = model is None or (model.state is not ModelState.READY and now >= model.retry_at)
            if server is not replica and (server is not None or can_start):
                return model is not None
            await asyncio.sleep(LOOK_S)
        return False

    def get_state(self, model: str) -> str:
        """Return the name of the model's state."""
        known = self.core.models.get(model)
        return str(known.state) if known else "gone"

    def get_start_progress(self, model: str) -> Progress:
        """Return the progress of the model's start."""
        known = self.core.models.get(model)
        if known is None:
            return Progress(model, "gone")
        return estimate_progress(known, self.clock(), self._find_step(model))

    def _find_step(self, model: str) -> StartProgress | None:
        known, replica = self.core.models.get(model), self.lifecycle.replicas.get(model)
        return replica.server.progress if known and known.state is ModelState.STARTING and replica else None

    def find_server(self, name: str | None) -> tuple[LocalReplica | None, str]:
        """Return the running server for a model name or alias (None: the default model), or None and why no server runs."""
        route = self.catalogue.find_destination(name)
        if route is None:
            return None, build_unknown_model_error(name).reason
        replica = self.lifecycle.replicas.get(route.model)
        return replica, "" if replica else (
            f"no server of model {route.model} is running: the model is {self.get_state(route.model)}"
        )

    def emit(self, event: Event) -> None:
        """Send an event to the core and execute the resulting actions."""
        for action in self.core.handle(event, self.clock()):
            self._do(action)
        self._set_timer(self.core.deadline())

    def _do(self, action: Action) -> None:
        match action:
            case events.DispatchRequest(number, model):
                self._dispatch(number, self.lifecycle.replicas.get(model))
            case events.RejectRequest(number, code, reason, after, detail, hint):
                self._refuse(number, AdmissionRefusedError(code, reason, after, detail, hint))
            case _:
                if isinstance(action, events.ChangeTier) and action.evicted_for is not None:
                    for ticket in self._tickets.values():
                        if ticket.destination.model == action.evicted_for:
                            ticket.evicted_models.append(action.model)
                self.lifecycle.execute(action)

    def configure(self, file: HostFile) -> None:
        """Apply a new configuration. Raises UsageError without changing anything if it is invalid."""
        self.emit(events.ConfigurationChanged(file.models, file.settings))
        self.catalogue = file.catalogue
        self.record.register_models(file)
        for name in self.facts.models.keys() - {*file.catalogue.launches, *self.core.models}:
            del self.facts.models[name]
        self.lifecycle.configure(file.catalogue.launches)
        self.schedule.configure(file.crontabs)

    def start_model(self, model: str) -> Ticket:
        """Start a model as a request would, without counting a request. `Ticket.granted` completes when the model is ready.

        Raises AdmissionRefusedError under the same conditions as `admit_request`.
        """
        ticket = self.admit_request(model, is_client_request=False)
        ticket.granted.add_done_callback(lambda _: self.end_request(ticket))
        return ticket

    def _prewarm(self, model: str) -> None:
        def end(granted: asyncio.Future[Replica]) -> None:
            if (refused := granted.exception()) is not None and not self.facts.stopping:
                self.record.record_missed_prewarming(model, str(refused))

        self.log.write("prewarm", model=model)
        self.start_model(model).granted.add_done_callback(end)

    def stop_models(self, model: str | None) -> list[str]:
        """Stop a model after its running requests. If `model` is None, stop all models except the pinned and default models.

        Return the names of the models that are stopped.
        """
        models, returns = self.core.models, self.core.residents.restarts_by_itself
        names = [model] if model is not None else [name for name, one in models.items() if not returns(one)]
        gone = [name for name in names if models[name].state in (ModelState.READY, ModelState.ASLEEP)]
        for name in gone:
            self.log.write("unload", model=name)
            self.emit(events.ServerOutdated(name, "unloaded by an operator"))
        return gone

    def status(self) -> dict[str, object]:
        """Return the status document of the host."""
        for model in self.core.models:
            facts = self.facts.get_model(model)
            facts.next_prewarm_unix_s = self.schedule.get_next_start(model)
            facts.progress = self._find_step(model)
        return status.build_status(self.core, self.facts, self.clock(), time.time())

    def begin(self) -> None:
        """Start the runtime template, the pinned models and the timers."""
        self.lifecycle.begin()
        self.schedule.configure(self._crontabs)
        self._tick()

    def drain(self) -> None:
        """Reject new and pending requests, and stop each model when its running requests have ended."""
        self.reject_requests()
        self.schedule.configure({})
        self.emit(events.ConfigurationChanged((), reason=STOPPING))
        self.lifecycle.drain()

    async def close(self, *, at_once: bool = False) -> None:
        """Wait until every server has exited. If `at_once` is set, stop the servers without waiting for running requests."""
        if at_once:
            self.lifecycle.kill()
        await self.lifecycle.close()
        self.moves.close()
        self._set_timer(inf)
