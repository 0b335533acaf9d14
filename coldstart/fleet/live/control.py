"""Live controller: carries out the decisions of the fleet's core. It neither needs nor imports Ray.

Invariant: every order of the core results in exactly one event: a launch in ready or dead ranks, a stop in Stopped, a
release in Released, a move in Moved unless the request ends first. All code runs on one event loop, so the core
processes one event at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event, LaunchRank
from coldstart.fleet.groups import GroupPhase
from coldstart.fleet.live.gateway_calls import GatewayCalls
from coldstart.fleet.live.gateways import Gateways
from coldstart.fleet.live.measurements import Measurements
from coldstart.fleet.live.messages import GroupRoute, MoveRequest, RefuseRequest, SendRequest
from coldstart.fleet.live.orders import Node, NodeReport, WorkerEvent
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.live.status import ControllerFacts, controller_status
from coldstart.fleet.live.wire import ModelDeployment
from coldstart.fleet.live.workers import Workers
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.launches import Catalogue
from coldstart.host.live.log import Log
from coldstart.host.live.tasks import Tasks

Recorder = Callable[[float, Event, list[Action]], None]


class FleetControl:
    """Controller of one fleet. `record` receives every event and the resulting actions."""

    def __init__(
        self,
        settings: FleetSettings,
        state: FleetState,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.core = FleetCore(settings, models=[one.spec for one in state.models.values()])
        self.state, self.clock, self.log, self.record = state, clock, log or Log(quiet=True), record
        self.gateways = Gateways(clock)
        self.calls = GatewayCalls(self.gateways, self.tell, self.log)
        self.tasks = Tasks(self.log)
        self.measurements = Measurements(state, self.core.models, self.tell, self.log)
        self.workers = Workers(
            self.core, state, self.gateways, self.measurements, self.tell, self.tasks, self.log
        )
        self.unusable: dict[str, str] = {}
        self.began = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def tell(self, event: Event) -> None:
        """Send an event to the core and carry out the resulting actions."""
        if self._closed:
            return
        now = self.clock()
        actions = self.core.handle(event, now)
        if self.record is not None:
            self.record(now, event, actions)
        ranks: dict[str, list[LaunchRank]] = {}
        for action in actions:
            if isinstance(action, LaunchRank):
                ranks.setdefault(action.group, []).append(action)
            else:
                self._do(action)
        for group in ranks.values():
            self.workers.launch(group)
        if actions or not isinstance(event, (events.Arrived, events.Ended, events.Routed)):
            self._publish()
        self._rearm()

    def close(self) -> None:
        """Cancel the timer and all tasks, and ignore every later event."""
        self._closed = True
        self.tasks.cancel()
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rearm(self) -> None:
        self._disarm()
        if (due := self.core.deadline()) < inf:
            wait = max(0.0, due - self.clock()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(wait, self.tell, events.Tick())

    def _do(self, action: Action) -> None:
        match action:
            case events.Stop(worker):
                self.workers.stop(worker)
            case events.Release(worker, group):
                self.workers.release(worker, group)
            case events.FetchRest(worker):
                self.workers.load_whole(worker)
            case events.Share(worker, rate):
                self.workers.share(worker, rate)
            case events.Send(request, group):
                self.calls.order(SendRequest(request, group))
            case events.Refuse(request, status, reason, after):
                self.calls.order(RefuseRequest(request, status, reason, after))
            case events.Move(request, _, target):
                if not self.calls.order(MoveRequest(request, target)):
                    asyncio.get_running_loop().call_soon(self.tell, events.Moved(request, False))

    def process_event(self, event: WorkerEvent) -> None:
        """Process a worker event of a server."""
        self.workers.process_event(event)

    def joined(self, spec: ServerSpec, node: Node) -> None:
        """Add a server without workers."""
        self.unusable.pop(spec.name, None)
        self.log.say("server joined", server=spec.name)
        self.workers.processes.nodes[spec.name] = node
        self.tell(events.Joined(spec))
        self.measurements.emit_speed(spec.name)
        if spec.name in self.state.drained:
            self.tell(events.Drained(spec.name))

    def unreached(self, server: str, reason: str) -> None:
        """Record that a server cannot be used though its node is alive: it is lost, and the status shows the reason."""
        if self.unusable.get(server) != reason:
            self.log.say("server unusable", server=server, reason=reason)
        self.lose_server(server)
        self.unusable[server] = reason

    def lose_server(self, server: str) -> None:
        """Record that a server and all its workers were lost."""
        self.unusable.pop(server, None)
        if not self.workers.processes.lose(server):
            return
        self.log.say("server lost", server=server)
        self.tell(events.ServerLost(server))

    def rebuild(self, found: Iterable[tuple[ServerSpec, Node, NodeReport]]) -> None:
        """Rebuild the state after a restart from the servers and their workers; called once, before all else."""
        servers: list[ServerSpec] = []
        for spec, node, report in found:
            self.workers.processes.adopt(spec.name, node, report)
            servers.append(spec)
        ranks = self.workers.processes.list_ranks()
        if ranks:
            self.gateways.expect()
        self.log.say("rebuilt", servers=[spec.name for spec in servers], workers=len(ranks))
        self.tell(events.Rebuilt(tuple(servers), ranks, tuple(sorted(self.state.drained))))
        for spec in servers:
            self.measurements.emit_speed(spec.name)

    def _publish(self) -> None:
        routes = {}
        for group in self.core.groups.values():
            up = self.workers.processes.answering(group)
            if group.phase is GroupPhase.SERVING and up is not None:
                where = group.name, group.model, up.url, group.capacity, up.mode, up.start_s, up.key
                routes[group.name] = GroupRoute(*where)
        launches = tuple(one.launch for one in self.state.models.values())
        self.gateways.publish(routes, launches, self.workers.hung)

    def deploy(self, deployment: ModelDeployment) -> None:
        """Deploy a model, or replace its launch or limits; servers with outdated arguments stop after their requests.

        Raises UsageError for a name that refers to another model.
        """
        name = deployment.spec.name
        before = self.state.models.get(name)
        Catalogue(one.launch for one in ({**self.state.models, name: deployment}).values())
        same = before is not None and before.launch.same_server == deployment.launch.same_server
        if before is not None and same:
            known = {**before.spec.joins, **deployment.spec.joins}
            deployment = replace(deployment, spec=replace(deployment.spec, joins=known))
        self.state.deploy(deployment)
        if before is not None and not same:
            self.tell(events.Removed(name))
        self.tell(events.Deployed(deployment.spec))

    def scale(self, name: str, least: int, most: int) -> None:
        """Set the minimum and maximum number of workers. Raises UsageError for an unknown model or invalid limits."""
        known = self._known(name)
        self.deploy(replace(known, spec=replace(known.spec, least=least, most=most)))

    def remove(self, name: str) -> None:
        """Remove a model. Raises UsageError if it is not deployed."""
        self._known(name)
        self.state.remove(name)
        self.tell(events.Removed(name))

    def _known(self, name: str) -> ModelDeployment:
        if name not in self.state.models:
            raise UsageError(f"model {name} is not deployed", hint="coldstart fleet status")
        return self.state.models[name]

    def drain(self, server: str) -> None:
        """Drain a server: it accepts no new worker. Raises UsageError for an unknown server."""
        if server not in self.workers.processes.nodes:
            raise UsageError(f"the fleet has no server {server}", hint="coldstart fleet status")
        self.state.drain(server)
        self.tell(events.Drained(server))

    def status(self) -> Mapping[str, Any]:
        """Return the controller's part of the document of `coldstart fleet status`."""
        uptime_s, gateways = self.clock() - self.began, len(self.gateways.known)
        facts = ControllerFacts(self.calls.incarnation, uptime_s, gateways, self.unusable, self.state.links)
        return controller_status(self.core, self.workers.processes, facts)
