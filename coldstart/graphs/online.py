"""Start from a proven bundle: link, restore the first graphs, run the canary, then restore the rest.

The server is ready after the canary. Invariant: before the first answer, either the canary's hash equals that
of the proof, or no restored graph is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coldstart.graphs import gate
from coldstart.graphs.errors import GraphError
from coldstart.graphs.inputs import StoredInputs
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.system.start_progress import Counter

Show = Callable[[], None]


class Online:
    """Restore during one start.

    `workload` None omits the canary. With `every`, each graph is a canary before the server is ready. Graphs of batches up
    to `batch` rows are restored before it is ready, because the check of its answers uses them.
    """

    def __init__(
        self, restorer: Restorer, proof: gate.Proof, workload: StoredInputs | None, *, every: bool = False,
        batch: int = 1,
    ) -> None:  # fmt: skip
        self.restorer, self._proof, self._workload, self._every = restorer, proof, workload, every
        self._batch = batch
        self._waiting: dict[str, Show] = {}
        self._first: list[str] = []

    @property
    def fallbacks(self) -> dict[str, str]:
        """Return the reason for each graph that is captured; `*` stands for all graphs."""
        return self.restorer.fallbacks

    def begin(self) -> bool:
        """Return whether restored graphs may be used; False drops all of the bundle."""
        if not self.restorer.link():
            return False
        self._first = self.restorer.list_first(self._batch)
        counter = Counter("restore graphs", len(self._first), "graphs")
        for number, key in enumerate(self._first, 1):
            self.restorer.graph_or_none(key)
            counter.show(number)
        if self._workload is not None and (bad := self._canaries(self._workload)):
            self.restorer.drop(f"the canary failed: {'; '.join(f'{key}: {why}' for key, why in bad.items())}")
            return False
        return True

    def _canaries(self, workload: StoredInputs) -> dict[str, str]:
        keys = self._proof.proven if self._every else self._proof.proven[:1]
        bad: dict[str, str] = {}
        for key in keys:
            try:
                with workload.preserve(key):
                    bad |= gate.find_mismatches(
                        self._proof, self.restorer, self.restorer.driver, workload, [key]
                    )
            except GraphError as error:
                bad[key] = str(error)
        return bad

    def is_first(self, key: str) -> bool:
        """Return whether this graph is built before the server is ready."""
        return key in self._first

    def defer(self, key: str, show: Show) -> None:
        """Build the graph in the background; `show` is called in that thread when the graph can be replayed."""
        self._waiting[key] = show

    def build_deferred(self) -> None:
        """Build the graphs that wait; call this when the process captures no more graphs."""
        self.restorer.start(list(self._waiting), partial(_shown, self._waiting))


def _shown(waiting: dict[str, Show], key: str, graph: Replayable) -> None:
    del graph
    waiting[key]()
