"""Workers and the groups that serve with them, without I/O.

A group is a pipeline of one or more workers, each on another server. When a pipeline is consolidated, every remaining
worker becomes its own group, in addition to the old group until the last stream has moved.

starting --all ready--> serving --consolidated, idle or removed--> leaving;  any --a worker died--> removed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

_FULL_ENGINE, _BACKGROUND = "/whole", "+rest"


def name_group(model: str, number: int) -> str:
    """Return the name of the group with this number among those of its model."""
    return f"{model}#{number}"


def find_group_number(group: str) -> int:
    """Return the number in the name of a group, or of a worker or its engine."""
    return int(group.rpartition("#")[2].partition(".")[0])


def name_full_engine(worker: str) -> str:
    """Return the name of a worker's full-model engine, next to the engine of its rank, and of the group that it serves."""
    return worker + _FULL_ENGINE


def is_full_engine(name: str) -> bool:
    """Return whether an engine or a group is that of a worker with the full model, next to its rank."""
    return name.endswith(_FULL_ENGINE)


def find_worker(engine: str) -> str:
    """Return the worker of an engine."""
    return engine.removesuffix(_FULL_ENGINE)


def name_background_fetch(worker: str) -> str:
    """Return the name of the worker's background fetch in its server's bandwidth reservations."""
    return worker + _BACKGROUND


class GroupPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True)
class FleetWorker:
    """A rank on a device.

    `memory` is its device memory in bytes, `rest` the bytes of the other ranks, `groups` the groups that it serves.
    `full`: its device memory suffices for the full model; `whole`: it holds the full model.
    """

    name: str
    model: str
    server: str
    device: int
    memory: int
    size: int
    rest: int
    full: bool
    ready: bool = False
    whole: bool = False
    stopping: bool = False
    groups: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """A group of workers.

    `keep` workers remain after consolidation; `capacity` is its limit of concurrent requests; `since` is the time at
    which it became idle or began. `predicted_s` is the predicted time to its first token at launch, including the
    wait of its oldest request; None for a group that was found when the fleet's process began. It gets no request
    before `suspect_until`.
    """

    name: str
    model: str
    workers: list[FleetWorker]
    keep: int
    capacity: int
    phase: GroupPhase = GroupPhase.STARTING
    in_flight: dict[str, None] = field(default_factory=dict)
    since: float = 0.0
    predicted_s: float | None = None
    suspect_until: float = 0.0

    @property
    def spare(self) -> int:
        return max(0, self.capacity - len(self.in_flight)) if self.phase is not GroupPhase.LEAVING else 0

    @property
    def idle(self) -> bool:
        return self.phase is GroupPhase.SERVING and not self.in_flight

    @property
    def ready(self) -> bool:
        return all(worker.ready for worker in self.workers)

    @property
    def single(self) -> bool:
        """Return whether it is the own group of one worker of a former pipeline."""
        return is_full_engine(self.name)

    def remaining(self) -> list[FleetWorker]:
        """Return the workers that will hold the full model."""
        return [worker for worker in self.workers if worker.full][: self.keep]
