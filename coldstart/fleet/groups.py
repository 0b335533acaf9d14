"""State of deployed models in the core: waiting requests, workers, and the groups that workers form, without I/O.

A group is a pipeline of one or more workers, each on a different server. Consolidation replaces a pipeline with single
workers: beside each rank that is kept, a new group of one worker loads the full model. These groups receive no requests
until all of them are ready.

starting --all ready--> serving --consolidated, idle or removed--> leaving;  any --a worker died--> removed

The number of workers that a model needs now is that of ParaServe, section 6.1:
required = ceil(max(0, waiting + arrivals in W - room) / batch).
`room` is the number of requests that live and starting workers can still accept. The paper instead subtracts all live
workers, so it would never start another worker while all workers are busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from math import ceil, inf

from coldstart.fleet.events import LaunchRank
from coldstart.fleet.specification import FleetModel, FleetSettings
from coldstart.host.agenda import Agenda


class GroupPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True)
class GroupWorker:
    """A worker process with `memory` bytes of reserved device memory. `full` is True if this is enough for a full model."""

    launch: LaunchRank
    memory: int
    full: bool
    ready: bool = False
    stopping: bool = False

    @property
    def name(self) -> str:
        return self.launch.worker

    @property
    def server(self) -> str:
        return self.launch.server


@dataclass(slots=True)
class Group:
    """A group of workers that serve one copy of a model.

    After consolidation, `keep` workers remain, each of which serves up to `batch` concurrent requests. `since` is the
    time at which the group started or became idle. `replaces` is the name of the pipeline that it replaces. `predicted_s`
    is the time to first token predicted at launch, including the time that the oldest request had waited, or None if an
    earlier gateway launched the group. `choice` explains why the group has this number of ranks. The group receives no
    requests before `suspect_until`. `streams_to_move` are the requests of a drained group that have yet to be migrated.
    """

    name: str
    model: str
    workers: list[GroupWorker]
    keep: int
    batch: int
    phase: GroupPhase = GroupPhase.STARTING
    in_flight: dict[str, None] = field(default_factory=dict)
    since: float = 0.0
    predicted_s: float | None = None
    choice: str = ""
    suspect_until: float = 0.0
    replaces: str = ""
    streams_to_move: dict[str, None] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Return the maximum number of requests that the group can serve concurrently."""
        return self.batch * self.keep

    @property
    def spare(self) -> int:
        return max(0, self.capacity - len(self.in_flight)) if self.phase is not GroupPhase.LEAVING else 0

    @property
    def idle(self) -> bool:
        return self.phase is GroupPhase.SERVING and not self.in_flight

    @property
    def ready(self) -> bool:
        return all(worker.ready for worker in self.workers)


@dataclass(slots=True)
class Deployment:
    """State of one deployed model. `number` is the number of its latest group.

    `failures` counts consecutive failed starts. No group starts before `retry_at`, nor on a server in `avoided_until` as long
    as another server is suitable. `failed_ranks` maps each pipeline size that failed to start to the time until which it
    is avoided, and the reason.
    """

    spec: FleetModel
    window_s: float
    arrivals: deque[float] = field(default_factory=deque)
    waiting: dict[str, float] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    failures: int = 0
    retry_at: float = 0.0
    avoided_until: dict[str, float] = field(default_factory=dict)
    failed_ranks: dict[int, tuple[float, str]] = field(default_factory=dict)
    error: str = ""
    retired: bool = False
    number: int = 0

    def name_next_group(self) -> str:
        """Return a new name for the next group of the model."""
        self.number += 1
        return f"{self.spec.name}#{self.number}"

    def list_replacements(self, pipeline: Group) -> list[Group]:
        """Return the groups that are to replace `pipeline`."""
        return [group for group in self.groups.values() if group.replaces == pipeline.name]

    def live(self) -> int:
        """Return the number of workers that serve now or will serve after consolidation."""
        return sum(group.keep for group in self.groups.values() if group.phase is not GroupPhase.LEAVING)

    def has_minimum_without(self, group: Group) -> bool:
        """Return whether the model would still have its minimum number of workers without `group`."""
        return self.live() - group.keep >= self.spec.least

    def count_workers_to_start(self, now: float) -> int:
        """Return the number of workers to start now.

        They are required by the waiting requests, the arrivals in the last `window_s`, and the streams to be migrated.
        """
        if self.retired or now < self.retry_at:
            return 0
        room = sum(group.spare for group in self.groups.values())
        while self.arrivals and self.arrivals[0] <= now - self.window_s:
            self.arrivals.popleft()
        waiting = len(self.waiting)
        arrived = len(self.arrivals) if waiting > room else 0
        moving = sum(len(group.streams_to_move) for group in self.groups.values())
        need = ceil((waiting + arrived + moving - room) / self.spec.batch)
        live = self.live()
        return max(0, min(max(need, self.spec.least - live), self.spec.most - live))

    def find_next_dispatch(self, now: float) -> tuple[str, Group] | None:
        """Return the oldest waiting request and the first group that can accept it, or None if none can be dispatched."""
        request = next(iter(self.waiting), None)
        if request is None or (group := next(self.find_open_groups(now), None)) is None:
            return None
        return request, group

    def find_open_groups(self, now: float) -> Iterator[Group]:
        """Yield the groups that can accept a request."""
        for group in self.groups.values():
            if group.phase is GroupPhase.SERVING and group.spare and group.suspect_until <= now:
                yield group

    def list_avoided_servers(self, now: float) -> frozenset[str]:
        """Return the servers on which a start failed recently. The cause may be the server itself, such as its full disk."""
        self.avoided_until = {server: until for server, until in self.avoided_until.items() if now < until}
        return frozenset(self.avoided_until)

    def get_startable_spec(self, now: float) -> FleetModel:
        """Return the model's specification, in which pipeline sizes that recently failed to start are unavailable."""
        self.failed_ranks = {ranks: one for ranks, one in self.failed_ranks.items() if now < one[0]}
        if not self.failed_ranks:
            return self.spec
        failed = {
            ranks: f"the last start failed: {reason}" for ranks, (_, reason) in self.failed_ranks.items()
        }
        return replace(self.spec, unavailable={**self.spec.unavailable, **failed})

    def failed(self, reason: str, now: float, settings: FleetSettings, *, counts: bool) -> None:
        self.failures, self.error = self.failures + counts, reason
        backoff = settings.backoff_s * 2 ** min(max(self.failures - 1, 0), 60)
        self.retry_at = now + min(settings.backoff_max_s, backoff)


class ModelAgenda(Agenda):
    """Agenda of a fleet: open requests, timers, and the models to process.

    Models are processed in the order in which `touch` marked them. A model for which no server had enough memory is blocked
    until memory becomes free on any server.
    """

    def __init__(self, models: Mapping[str, Deployment], hold_s: float) -> None:
        super().__init__(models, hold_s)
        self._touched: dict[str, None] = {}
        self._blocked: dict[str, None] = {}

    def deadline(self) -> float:
        """Return the time at which the core must run next, or minus infinity if there are models left to process."""
        return -inf if self._touched else super().deadline()

    def touch(self, model: str) -> None:
        self._touched[model] = None

    def free(self) -> None:
        """Mark the blocked models to be processed again, because memory or bandwidth may have become free."""
        self._touched |= self._blocked

    def block(self, model: str) -> None:
        self._blocked[model] = None

    def unblock(self, model: str) -> None:
        self._blocked.pop(model, None)

    def take(self, most: int) -> list[str]:
        """Remove up to `most` models from the models to process, and return them."""
        names = list(islice(self._touched, most))
        for name in names:
            del self._touched[name]
        return names
