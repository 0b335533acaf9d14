"""Models whose demand or available memory has changed; after each event the core processes only these."""

from __future__ import annotations


class Recheck:
    """Names of models to process, in the order in which they were touched.

    A model that found no room is blocked: it is processed again once memory has become free on any server.
    """

    def __init__(self) -> None:
        self._touched: dict[str, None] = {}
        self._blocked: dict[str, None] = {}
        self._freed = False

    def touch(self, model: str) -> None:
        self._touched[model] = None

    def free(self) -> None:
        """Record that a device or a link may have more room than before."""
        self._freed = True

    def block(self, model: str) -> None:
        self._blocked[model] = None

    def unblock(self, model: str) -> None:
        self._blocked.pop(model, None)

    def take(self) -> dict[str, None]:
        """Return the models to process now, and reset; empty if nothing has changed."""
        names = self._touched | (self._blocked if self._freed else {})
        self._touched, self._freed = {}, False
        return names
