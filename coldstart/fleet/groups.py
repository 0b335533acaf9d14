"""Workers and the groups that serve with them, pure.

A group is a pipeline of one or more workers; each is on another server. When a pipeline is consolidated, every worker that
remains becomes a group of its own, beside the old one until the last stream has moved.

    starting --all ready--> serving --consolidated, idle or removed--> leaving;  any --a worker died--> gone
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

WHOLE = "/whole"
"""Ends the name of a worker's own group, and of the engine that it has for it, beside the one of its rank."""


class GroupPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True)
class FleetWorker:
    """A rank on a device; `memory` is what it has there, `rest` the bytes of the other ranks. `groups` it works for."""

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
    """`keep` workers are to remain of it; `capacity` requests at once; `since` is when it became idle or began.

    `predicted_s` until its first token were predicted when it was launched, with what its oldest request had waited; None
    for one that was found.
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
        """Whether it is a worker's own, out of a pipeline."""
        return self.name.endswith(WHOLE)

    def remaining(self) -> list[FleetWorker]:
        """The workers that are to become the whole model."""
        return [worker for worker in self.workers if worker.full][: self.keep]
