"""When the lane decides anew: after an arrival, an end, an eviction, a landing, when a quantum may be over and when the
ledger opens; in between the engine goes on with what was decided, and a step costs O(1).

Invariant: a request gains at most one token a step, so no quantum ends before as many steps as tokens are missing.
"""

from __future__ import annotations

PERIOD = 16
"""Steps after which the lane decides in any case: the pressure changes by itself."""


class Rhythm:
    """`stir` it where something has changed; `steps` have passed since the last decision."""

    def __init__(self) -> None:
        self.steps, self._last = 0, 1
        self._stirred, self._open = True, False

    def stir(self) -> None:
        self._stirred = True

    def due(self, is_open: bool, /) -> bool:
        """Once a step: whether to decide."""
        self.steps += 1
        return self._stirred or is_open != self._open or self.steps >= self._last

    def deciding(self, is_open: bool, /) -> None:
        self._stirred, self._open, self.steps = False, is_open, 0

    def rest(self, tokens: int) -> None:
        """`tokens` are missing until the first quantum ends."""
        self._last = max(1, min(PERIOD, tokens))
