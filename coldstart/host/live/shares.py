"""Use of one limited resource, in total and by client address."""

from __future__ import annotations

from collections import Counter


class Shares:
    """Amounts of a resource in use: at most `total`, and at most `per_address` for one address."""

    def __init__(self, total: int, per_address: int) -> None:
        self.total, self.per_address = total, per_address
        self.used = 0
        self.addresses: Counter[str] = Counter()

    def take(self, address: str, amount: int = 1) -> bool:
        """Return whether `amount` was free; it is then in use by `address`."""
        mine = self.addresses[address] + amount
        if mine > self.per_address or self.used + amount > self.total:
            return False
        self.addresses[address] = mine
        self.used += amount
        return True

    def release(self, address: str, amount: int = 1) -> None:
        """Return an amount that `take` granted."""
        self.used -= amount
        self.addresses[address] -= amount
        if not self.addresses[address]:
            del self.addresses[address]
