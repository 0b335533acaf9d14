"""Processes of the fleet's workers by name, and the servers that they run on, as the controller knows them."""

from __future__ import annotations

from coldstart.fleet import events
from coldstart.fleet.events import LaunchRank
from coldstart.fleet.groups import Group
from coldstart.fleet.live.orders import Node, NodeReport, RankFetched, RankUp


class Processes:
    """Processes of one controller, by name.

    `ordered` were sent to their server, `stopping` were ordered to stop, and `dying` wait for an engine's end. `rates` are the
    rates that fetches were last given, in bytes/s; None means without a limit.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.launched: dict[str, LaunchRank] = {}
        self.up: dict[str, RankUp] = {}
        self.rates: dict[str, float | None] = {}
        self.fetched: dict[str, RankFetched] = {}
        self.ordered: set[str] = set()
        self.stopping: set[str] = set()
        self.dying: dict[str, str] = {}

    def answering(self, group: Group) -> RankUp | None:
        """Return the process that answers for a group, once it is up."""
        return self.up.get(group.name if group.single else group.workers[0].name)

    def forget(self, name: str) -> None:
        """Forget the fetch of a process that has ended."""
        self.ordered.discard(name)
        self.rates.pop(name, None)
        self.fetched.pop(name, None)

    def lose(self, server: str) -> bool:
        """Forget a server with all of its processes; return whether it was known."""
        if self.nodes.pop(server, None) is None:
            return False
        for name in [rank.worker for rank in self.launched.values() if rank.server == server]:
            del self.launched[name]
            self.forget(name)
            self.up.pop(name, None)
            self.stopping.discard(name)
            self.dying.pop(name, None)
        return True

    def adopt(self, server: str, node: Node, report: NodeReport) -> None:
        """Add a server with the processes that it had before this controller started."""
        self.nodes[server] = node
        for worker in report.workers:
            self.launched[worker.rank.worker] = worker.rank
            self.ordered.add(worker.rank.worker)
            if worker.stopping:
                self.stopping.add(worker.rank.worker)
            if worker.up is not None and worker.rank.rank == 0:
                self.up[worker.up.worker] = worker.up

    def found_ranks(self) -> tuple[events.FoundRank, ...]:
        """Return all processes as found; a group is ready when its first rank is."""
        ready = {self.launched[name].group for name in self.up}
        return tuple(
            events.FoundRank(rank, rank.group in ready, name in self.stopping)
            for name, rank in self.launched.items()
        )
