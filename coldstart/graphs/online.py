"""Start from a proven bundle: link, restore the first graphs, run the canary, then restore the rest.

The server is ready after the canary. Invariant: before the first answer, either the canary's hash equals that
of the proof, or no restored graph is in use.
"""

from __future__ import annotations

from collections.abc import Callable

from coldstart.graphs.errors import GraphError
from coldstart.graphs.inputs import StoredInputs
from coldstart.graphs.prove import Proof, hash_outputs
from coldstart.graphs.restore import Restorer
from coldstart.system.start_progress import Counter


class Online:
    """Restore during one start.

    `workload` None omits the canary. With `every`, each graph is a canary before the server is ready. Graphs of batches up
    to `batch` rows are restored before it is ready, because the check of its answers uses them.
    """

    def __init__(
        self, restorer: Restorer, proof: Proof, workload: StoredInputs | None, *, every: bool = False, batch: int = 1
    ) -> None:  # fmt: skip
        self.restorer, self._proof, self._workload = restorer, proof, workload
        self._every, self._batch = every, batch
        self._waiting: dict[str, Callable[[], None]] = {}
        self._first: list[str] = []

    def begin(self) -> bool:
        """Return whether restored graphs may be used; False drops all of the bundle."""
        if not self.restorer.link():
            return False
        self._first = self.restorer.list_first(self._batch)
        counter = Counter("restore graphs", len(self._first), "graphs")
        for number, key in enumerate(self._first, 1):
            self.restorer.restore(key)
            counter.show(number)
        bad = self.find_mismatches(self._proof.proven if self._every else self._proof.proven[:1])
        if bad:
            self.restorer.drop(f"the canary failed: {'; '.join(f'{key}: {why}' for key, why in bad.items())}")
        return not bad

    def find_mismatches(self, keys: list[str]) -> dict[str, str]:
        """Return the graphs whose outputs differ from the proof, with the reasons; inputs in use are preserved."""
        bad: dict[str, str] = {}
        if self._workload is None:
            return bad
        for key in keys:
            try:
                if (reason := self._find_mismatch(key, self._workload)) is not None:
                    bad[key] = reason
            except GraphError as error:
                bad[key] = str(error)
        return bad

    def _find_mismatch(self, key: str, workload: StoredInputs) -> str | None:
        graph, driver = self.restorer.restore(key), self.restorer.driver
        if graph is None:
            return self.restorer.fallbacks[key]
        with workload.preserve(key):
            found = hash_outputs(driver, workload, key, self._proof.seeds[0], graph.replay)
        return None if found == self._proof.hashes.get(key) else "its outputs differ from the proof"

    def is_first(self, key: str) -> bool:
        """Return whether this graph is built before the server is ready."""
        return key in self._first

    def defer(self, key: str, show: Callable[[], None]) -> None:
        """Build the graph in the background; `show` is called in that thread when the graph can be replayed."""
        self._waiting[key] = show

    def build_deferred(self) -> None:
        """Build the graphs that wait; call this when the process captures no more graphs."""
        self.restorer.start(list(self._waiting), lambda key: self._waiting[key]())
