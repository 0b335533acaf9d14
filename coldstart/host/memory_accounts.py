"""Memory reservations of the models, on the devices and in host memory.

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
            raise ValueError(
                f"{model} needs {size} bytes, but only {self.free() + self.reserved(model)} are free"
            )
        self.record(model, size)

    def record(self, model: str, size: int) -> None:
        """Record the measured bytes of `model`, whether they fit or not."""
        self.used += size - self._reserved.pop(model, 0)
        if size:
            self._reserved[model] = size


Place = int | None
"""A device, or None: all devices together."""


def share(size: int, devices: tuple[int, ...], place: Place) -> int:
    """Return the bytes of `size` in a place; on `devices` the size is spread evenly, as vLLM's tensor parallelism does."""
    if place is None:
        return size
    return -(-size // len(devices)) if place in devices else 0


class DeviceMemory(MemoryAccount):
    """Bytes of each model on all devices together, and its share of them on each device that it is placed on.

    All devices together hold `capacity` bytes, and each of them `each`.
    """

    def __init__(self, capacity: int, each: int) -> None:
        super().__init__(capacity)
        self.each = each
        self._devices: dict[str, tuple[int, ...]] = {}
        self._accounts: dict[int, MemoryAccount] = {}

    def resize(self, capacity: int, each: int) -> None:
        """Set other capacities in bytes."""
        self.capacity, self.each = capacity, each
        for account in self._accounts.values():
            account.capacity = each

    def place(self, model: str, devices: tuple[int, ...]) -> None:
        """Set the devices of a model, which remain as they are while it holds memory."""
        if not self.reserved(model):
            self._devices[model] = devices

    def devices(self, model: str) -> tuple[int, ...]:
        return self._devices.get(model, ())

    def account(self, place: Place) -> MemoryAccount:
        """Return the account of one place."""
        if place is None:
            return self
        return self._accounts.setdefault(place, MemoryAccount(self.each))

    def list_places(self) -> list[Place]:
        """Return all places on which a model was placed."""
        return [None, *self._accounts]

    def share(self, model: str, size: int, place: Place) -> int:
        """Return the bytes of `size` that the model takes in a place."""
        return share(size, self.devices(model), place)

    def reserve(self, model: str, size: int) -> None:
        """Reserve `size` bytes in total for `model`. Raises ValueError if they do not fit, or if one of its GPUs lacks room."""
        for number in self.devices(model):
            account, part = self.account(number), self.share(model, size, number)
            if part - account.reserved(model) > max(0, account.free()):
                raise ValueError(
                    f"{model} needs {part} bytes of GPU {number}, but only {account.free()} are free"
                )
        super().reserve(model, size)

    def record(self, model: str, size: int) -> None:
        """Record the measured bytes of `model`, whether they fit or not."""
        super().record(model, size)
        for number in self.devices(model):
            self.account(number).record(model, self.share(model, size, number))
