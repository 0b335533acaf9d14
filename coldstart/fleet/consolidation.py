"""From a pipeline to single workers (ParaServe, section 6): which remain, and which stream goes to whom.

Scaling down keeps one worker, scaling up as many as the load asks for, of those that have the memory or find it now; the
switch comes when all of them hold the whole model. Streams that cannot move end in the pipeline, which goes when its last one
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from coldstart.fleet.events import FetchRest, Move
from coldstart.fleet.groups import WHOLE, Group, GroupPhase
from coldstart.fleet.roster import Roster


class Consolidation:
    """`moving` has the group to which each stream on its way goes; it counts there already. `left` has, by the name of a
    pipeline that was split, the groups that its workers are now."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.moving: dict[str, str] = {}
        self.left: dict[str, list[str]] = {}

    def keeps_more(self, group: Group, batch: int, memory: int) -> bool:
        """Have one more worker of a pipeline that starts remain of it; whether there was one.

        A worker that is not full becomes so for that where its device still has room for `memory` bytes in all."""
        if len(group.workers) < 2 or group.phase is not GroupPhase.STARTING:
            return False
        full = [worker for worker in group.workers if worker.full]
        if len(full) <= group.keep and not any(
            self.roster.grown(worker, memory) for worker in group.workers if not worker.full
        ):
            return False
        group.keep += 1
        group.capacity = batch * group.keep
        return True

    def begin(self, group: Group, wanted: int, batch: int, now: float) -> Iterator[FetchRest]:
        """The pipeline serves: its first full workers fetch the rest; more of them where `wanted` came on top."""
        full = sum(worker.full for worker in group.workers)
        group.keep = max(1, min(full, group.keep + wanted))
        group.capacity = batch * group.keep
        for worker in group.remaining():
            yield self.roster.fetch_rest(worker, now)

    def complete(self, group: Group) -> bool:
        remaining = group.remaining()
        return len(group.workers) > 1 and bool(remaining) and all(worker.whole for worker in remaining)

    def split(self, group: Group, batch: int, now: float) -> list[Group]:
        """Each that remains is a group of its own; the old one takes nothing new."""
        group.phase = GroupPhase.LEAVING
        singles = []
        for worker in group.remaining():
            single = Group(
                worker.name + WHOLE, group.model, [worker], 1, batch, GroupPhase.SERVING, since=now
            )
            worker.groups.append(single.name)
            singles.append(single)
        self.left[group.name] = [single.name for single in singles]
        return singles

    def moves(self, group: Group, groups: Mapping[str, Group]) -> list[Move]:
        """Every stream of a pipeline that was split."""
        return [move for request in group.in_flight for move in self.move(request, group.name, groups)]

    def move(self, request: str, group: str, groups: Mapping[str, Group]) -> list[Move]:
        """One of its streams to the single worker with the fewest; nothing where it was not split, or none of them serves."""
        singles = [groups[name] for name in self.left.get(group, ()) if name in groups]
        if not singles:
            self.left.pop(group, None)
            return []
        target = min(singles, key=lambda single: len(single.in_flight))
        target.in_flight[request] = None
        self.moving[request] = target.name
        return [Move(request, group, target.name)]
