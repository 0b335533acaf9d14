"""The price of the express lane: what it may take of the contended resource, and how far its forecasts are believed.

Equations, only while somebody is left out: b += price * honesty * dt - (share * dt + prefill seconds of the lane), and
b <= credit * price * dt; honesty = clamp(2 o / f - 1, 0.05, 1), where of the last 25 passes or so f should have ended in
the lane and o did; of a class, each completion besides takes a hundredth off f - o: the next forecasts are learned from it.
A request that passes runs to the end of its quantum, so the lane may owe: nobody passes until that is paid. So the main lane
has at least (1 - price) of the resource, less credit * price iterations and the most that was owed at a time (`owed_s`),
whatever was learned.
"""

from __future__ import annotations

CREDIT = 24.0
"""Iterations of credit that may be saved up."""

LEAST = 0.05
_MEMORY = 0.04
_RELENT = 0.01
_FEWEST = 0.02


class Honesty:
    """Forecasts against what happened."""

    def __init__(self) -> None:
        self.foretold = self.observed = 0.0
        self.share = 1.0
        """1: passes end as foretold; falls to LEAST where half of them or fewer do."""

    def judged(self, chance: float, *, ended: bool) -> None:
        """A pass that was to end in the lane with that chance is over."""
        self.foretold += _MEMORY * (chance - self.foretold)
        self.observed += _MEMORY * (ended - self.observed)
        self._weigh()

    def relent(self) -> None:
        """A request ended, from which the next forecasts are learned: who may not pass could not show that they are better."""
        self.observed += _RELENT * max(0.0, self.foretold - self.observed)
        self._weigh()

    def _weigh(self) -> None:
        if self.foretold >= _FEWEST:
            self.share = min(1.0, max(LEAST, 2 * self.observed / self.foretold - 1))


class PriceLedger:
    """Seconds of the contended resource that the lane may take; negative: it owes them."""

    def __init__(self, price: float) -> None:
        self.price, self.balance = price, 0.0
        self.saved = 0.0
        """The balance as a share of the most that may be saved up; 0 where it owes."""

        self.honesty = Honesty()
        self.taken_s = self.crowded_s = self.owed_s = 0.0
        self.open = price > 0

    def passed(self, seconds: float, share: float, prefill_s: float) -> None:
        """An iteration took so long while somebody was left out, the lane having that share of it and of it so much prefill."""
        self.crowded_s += seconds
        earned = self.price * seconds
        balance = self.balance + earned * self.honesty.share
        if share or prefill_s:
            prefill_s = min(prefill_s, seconds)
            taken = share * (seconds - prefill_s) + prefill_s
            self.taken_s += taken
            balance -= taken
            self.owed_s = max(self.owed_s, -balance)
        most = CREDIT * earned
        self.balance = min(balance, most)
        self.saved = max(0.0, self.balance) / most if most > 0 else 0.0
        self.open = self.price > 0 and balance >= 0
