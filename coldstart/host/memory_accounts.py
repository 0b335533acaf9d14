"""Memory reservations of the models, on the device and in host memory.

Invariant: `used` is the sum of all reservations. It exceeds the capacity only if a model was measured to hold more
than was reserved; `reserve` rejects a size that does not fit.
"""

from __future__ import annotations


class MemoryAccount:
    """Bytes reserved by each model, against one capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._reserved: dict[str, int] = {}

    def reserved(self, model: str) -> int:
        return self._reserved.get(model, 0)

    def free(self) -> int:
        """Return the free bytes; negative if measurements exceed the capacity."""
        return self.capacity - self.used

    def reserve(self, model: str, size: int) -> None:
        """Reserve `size` bytes in total for `model`. Raises ValueError if they do not fit."""
        if size - self.reserved(model) > max(0, self.free()):
            raise ValueError(f"{model} needs {size} bytes, {self.free() + self.reserved(model)} are free")
        self.record(model, size)

    def record(self, model: str, size: int) -> None:
        """Record the measured bytes of `model`, whether they fit or not."""
        self.used += size - self._reserved.pop(model, 0)
        if size:
            self._reserved[model] = size
