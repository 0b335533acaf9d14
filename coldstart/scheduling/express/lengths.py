"""Hazard of the output length, learned online (the estimator of Kaplan and Meier over bins, with forgetting).

Equations: h_k = ended_k / exposed_k over output-length bins k whose edges grow by 1.19; exposed_k counts who ended in bin k
or later and who outlived it without having ended, live requests included: an overloaded server would learn only short
ones otherwise. Both counts are decayed with a half-life in completions. A class of requests starts from the hazard of
all, or from what its callers expect, and leaves it as its own completions come in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

GROWTH, LONGEST = 1.19, 1 << 17
CLASS_TRUST = 12
"""Completions before a class has a table of its own."""

MOST_CLASSES = 512
"""Classes that are remembered, the latest used ones: prefixes of prompts are without number."""

PRIOR, CLASS_PRIOR = 4.0, 8.0
"""Requests that the prior weighs: a constant hazard per token for all, the hazard of all for a class."""

REFRESH = 16
"""Completions between two tables."""

Kind = Hashable


def _edges() -> tuple[int, ...]:
    found = [1]
    while found[-1] < LONGEST:
        found.append(max(found[-1] + 1, int(found[-1] * GROWTH) + 1 if found[-1] >= 7 else found[-1] + 1))
    return tuple(found)


EDGES = _edges()
"""The least length of each bin; the last bin has no end."""

MIDS = (*((low + high - 1) / 2 for low, high in pairwise(EDGES)), float(EDGES[-1]))
SPANS = (*(high - low for low, high in pairwise(EDGES)), 1)

MOST_OCTAVES = LONGEST.bit_length()
"""Longer expectations are taken for this."""

BELIEVED = 0.9
"""Of callers who expect a length, as many as come within a factor of two of it, before anything is known of their class."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The class of requests whose caller expects from 2^(octave - 1) to 2^octave tokens."""

    kind: Kind
    octave: int

    def hazard(self, everybody: Sequence[float]) -> list[float]:
        """Before the class has ended anything: lengths from half the octave to twice it, by their logarithm as often in each
        part; who outlives that has the hazard of all, so that a wrong hint earns nothing further.
        """
        low, high = max(1.0, 2.0 ** (self.octave - 2)), 2.0 ** (self.octave + 1)
        alive, found = 1.0, list[float]()
        for begins, ends in pairwise(EDGES):
            if begins >= high:
                break
            within = max(0.0, log2(min(ends, high)) - log2(max(begins, low)))
            share = BELIEVED * within / log2(high / low)
            found.append(share / alive)
            alive -= share
        return found + list(everybody[len(found) :])


def bin_of(tokens: int) -> int:
    """The bin of an output length; 0 tokens are in the first."""
    return max(0, bisect_right(EDGES, tokens) - 1)


class Hazard:
    """Decayed counts of one class: who ended in each bin, and who left while in it (cut off, not ended)."""

    __slots__ = ("_fresh", "_keep", "cut", "ended", "seen", "version")

    def __init__(self, half_life: float) -> None:
        self.ended, self.cut = [0.0] * len(EDGES), [0.0] * len(EDGES)
        self.seen, self.version, self._fresh = 0.0, 0, 0
        self._keep = 0.5 ** (1 / half_life)

    def end(self, tokens: int, *, cut: bool = False) -> None:
        """One request left after so many tokens; `cut`: it did not end by itself, only outlived the bins before."""
        (self.cut if cut else self.ended)[bin_of(tokens)] += 1
        self.seen = self.seen * self._keep + (not cut)
        self._fresh += 1
        if self._fresh >= REFRESH:
            kept = self._keep**self._fresh
            self.ended = [count * kept for count in self.ended]
            self.cut = [count * kept for count in self.cut]
            self._fresh, self.version = 0, self.version + 1

    def rates(self, live: Mapping[int, int], prior: Sequence[float] | None, weight: float) -> list[float]:
        """h_k from the first bin to the last that anybody reached; `live`: requests under way by the bin they are in."""
        exposed = [0.0] * len(EDGES)
        total = 0.0
        for k in range(len(EDGES) - 1, -1, -1):
            total += self.ended[k]
            exposed[k] = total
            total += self.cut[k] + live.get(k, 0)
        top = max((k for k, count in enumerate(exposed) if count > 0.05), default=0)
        if prior is None:
            at_risk = sum(count * span for count, span in zip(exposed, SPANS, strict=True))
            each = min(0.999, sum(self.ended) / max(1.0, at_risk))
            prior = [1 - (1 - each) ** span for span in SPANS]
        elif len(prior) < len(EDGES):
            top = max(top, len(prior) - 1)
        return [
            (self.ended[k] + weight * prior[min(k, len(prior) - 1)]) / (exposed[k] + weight)
            for k in range(top + 1)
        ]


class Lengths:
    """The hazard of all requests and of each class. Memory: bins * (classes + 1), whatever was served."""

    def __init__(self, half_life: float = 400.0, trust: int = 40) -> None:
        self.half_life, self.trust = half_life, trust
        self.all = Hazard(half_life)
        self.classes: OrderedDict[Kind, Hazard] = OrderedDict()

    @property
    def version(self) -> int:
        return self.all.version

    @property
    def learned(self) -> bool:
        """Whether enough completions have been seen to let anybody pass."""
        return self.all.seen >= self.trust

    def left(self, kind: Kind, tokens: int, *, cut: bool = False) -> None:
        """A request of that class is gone after so many tokens."""
        self.all.end(tokens, cut=cut)
        if kind is None:
            return
        mine = self.classes.get(kind)
        if mine is None:
            mine = self.classes[kind] = Hazard(self.half_life)
            if len(self.classes) > MOST_CLASSES:
                self.classes.popitem(last=False)
        self.classes.move_to_end(kind)
        mine.end(tokens, cut=cut)

    def known(self, kind: Kind) -> Kind:
        """The class whose table serves a request of that class: its own once it is trusted, else that of what its caller
        expects, else that of all (None).
        """
        mine = self.classes.get(kind) if kind is not None else None
        if mine is not None and mine.seen >= CLASS_TRUST:
            return kind
        return Expected(None, kind.octave) if isinstance(kind, Expected) else None

    def rates(self, kind: Kind, live: Mapping[int, int], everybody: Sequence[float] = ()) -> list[float]:
        """The hazard for a class that `known` has named; `everybody`: that of all, where it has been worked out."""
        prior = everybody or self.all.rates(live, None, PRIOR)
        if isinstance(kind, Expected):
            mine = self.classes.get(kind) or Hazard(self.half_life)
            return mine.rates({}, kind.hazard(prior), CLASS_PRIOR)
        return self.classes[kind].rates({}, prior, CLASS_PRIOR) if kind in self.classes else list(prior)
