"""Who holds how much memory, on the device and beside it.

Invariant: `used` is the sum of what is held. It exceeds the capacity only by what was measured to be more than was
promised; `take` refuses what does not fit.
"""

from __future__ import annotations


class Ledger:
    """Bytes by model, against one capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._held: dict[str, int] = {}

    def held(self, model: str) -> int:
        return self._held.get(model, 0)

    def room(self) -> int:
        """Bytes left; below 0 where measurements went past the capacity."""
        return self.capacity - self.used

    def take(self, model: str, size: int) -> None:
        """Let the model hold `size` bytes in all. Raises ValueError where that does not fit."""
        if size - self.held(model) > max(0, self.room()):
            raise ValueError(f"{model} wants {size} bytes, {self.room() + self.held(model)} are left")
        self.correct(model, size)

    def correct(self, model: str, size: int) -> None:
        """Book what the model really holds."""
        self.used += size - self._held.pop(model, 0)
        if size:
            self._held[model] = size
