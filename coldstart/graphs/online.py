"""A start from a proven bundle: link, the smallest and the largest graph, the canary; then ready; then the rest.

Invariant: before the first answer either the canary's hash was the proof's, or no restored graph is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coldstart.graphs import gate
from coldstart.graphs.errors import GraphError
from coldstart.graphs.inputs import StoredInputs
from coldstart.graphs.restore import Replayable, Restorer

Show = Callable[[], None]


class Online:
    """One start. `workload` is None where the canary is not wanted."""

    def __init__(self, restorer: Restorer, proof: gate.Proof, workload: StoredInputs | None) -> None:
        self.restorer, self._proof, self._workload = restorer, proof, workload
        self._waiting: dict[str, Show] = {}
        self._first: list[str] = []

    @property
    def fallbacks(self) -> dict[str, str]:
        """Graph (or `*` for all) to the reason why it is captured."""
        return self.restorer.fallbacks

    def begin(self) -> bool:
        """Whether restored graphs may be used; False leaves nothing of the bundle behind."""
        if not self.restorer.link():
            return False
        self._first = self.restorer.first()
        for key in self._first:
            self.restorer.graph_or_none(key)
        if self._workload is not None and not self._canary(self._workload):
            self.restorer.drop("the canary's outputs are not those of the proof")
            return False
        return True

    def _canary(self, workload: StoredInputs) -> bool:
        if self._proof.canary is None:
            return False
        try:
            with workload.untouched(self._proof.canary[0]):
                return gate.canary(self._proof, self.restorer, self.restorer.driver, workload)
        except GraphError:
            return False

    def soon(self, key: str) -> bool:
        """Whether this graph is built before ready."""
        return key in self._first

    def later(self, key: str, show: Show) -> None:
        """Build that graph in the background; `show` is called, there, once it can be replayed."""
        self._waiting[key] = show

    def ready(self) -> None:
        """Nothing is being captured any more: build what waits."""
        self.restorer.start(list(self._waiting), partial(_shown, self._waiting))


def _shown(waiting: dict[str, Show], key: str, graph: Replayable) -> None:
    del graph
    waiting[key]()
