"""Consolidation of a pipeline into single workers (ParaServe, section 6).

Scaling down retains one worker. Scaling up retains as many as the load requires, among those with enough memory. The
switch happens when all of them hold the full model. Streams that cannot move end in the pipeline, which stops after
its last stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coldstart.fleet.events import FetchRest, Move
from coldstart.fleet.groups import WHOLE, Group, GroupPhase
from coldstart.fleet.roster import Roster


class Consolidation:
    """Consolidation of all pipelines.

    `moving` maps each stream that moves to its target group, which counts the stream from the start of the move.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.moving: dict[str, str] = {}

    def keeps_more(self, group: Group, batch: int, memory: int) -> bool:
        """Let one more worker of a starting pipeline remain after consolidation; return whether there was one.

        A worker that does not hold the full model is enlarged if its device has `memory` bytes in total for it.
        """
        if len(group.workers) < 2 or group.phase is not GroupPhase.STARTING:
            return False
        full = [worker for worker in group.workers if worker.full]
        if len(full) <= group.keep and not any(
            self.roster.grow(worker, memory) for worker in group.workers if not worker.full
        ):
            return False
        group.keep += 1
        group.capacity = batch * group.keep
        return True

    def begin(self, group: Group, wanted: int, batch: int, now: float) -> Iterator[FetchRest]:
        """Start consolidation of a ready pipeline: full workers fetch the rest; `wanted` more remain if possible."""
        full = sum(worker.full for worker in group.workers)
        group.keep = max(1, min(full, group.keep + wanted))
        group.capacity = batch * group.keep
        for worker in group.remaining():
            yield self.roster.fetch_rest(worker, now)

    def complete(self, group: Group) -> bool:
        remaining = group.remaining()
        return len(group.workers) > 1 and bool(remaining) and all(worker.whole for worker in remaining)

    def split(self, group: Group, batch: int, now: float) -> list[Group]:
        """Split the pipeline: each remaining worker becomes its own group, and the old group accepts no new request."""
        group.phase = GroupPhase.LEAVING
        singles = []
        for worker in group.remaining():
            single = Group(
                worker.name + WHOLE, group.model, [worker], 1, batch, GroupPhase.SERVING, since=now
            )
            worker.groups.append(single.name)
            singles.append(single)
        return singles

    def moves(self, group: Group, singles: Sequence[Group]) -> Iterator[Move]:
        """Yield a move for every stream of a split pipeline, to the single worker with the fewest streams."""
        for request in group.in_flight:
            target = min(singles, key=lambda single: len(single.in_flight))
            target.in_flight[request] = None
            self.moving[request] = target.name
            yield Move(request, group.name, target.name)
