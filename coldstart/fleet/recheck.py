"""Models whose demand or room has changed: the core looks at these after each event, and at no other."""

from __future__ import annotations


class Recheck:
    """Names of models to look at, in the order in which they were touched.

    A model that found no room is blocked: it is looked at again once room has become free anywhere.
    """

    def __init__(self) -> None:
        self._touched: dict[str, None] = {}
        self._blocked: dict[str, None] = {}
        self._freed = False

    def touch(self, model: str) -> None:
        self._touched[model] = None

    def free(self) -> None:
        """Note that a device or a link may have more room than before."""
        self._freed = True

    def block(self, model: str) -> None:
        self._blocked[model] = None

    def unblock(self, model: str) -> None:
        self._blocked.pop(model, None)

    def take(self) -> dict[str, None]:
        """Return the models to look at now, and begin anew; empty when nothing has changed."""
        names = self._touched | (self._blocked if self._freed else {})
        self._touched, self._freed = {}, False
        return names
