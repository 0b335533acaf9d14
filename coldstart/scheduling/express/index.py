"""The index of a request and the quantum that attains it (Gittins; Aalto, Ayesta and Righter, 2009).

Equations, seconds of the contended resource for a run from bin a to the end of bin b:
    C(a, b) = start + u sum_{k=a}^{b} P(S > k | S > a) m_k + P(S > b | S > a) park
    start = t_prefill(pending) - t_min + u   (0 where its KV is on the device)
    m_k = (prompt + k) / mean resident context where memory binds, else 1;   u = t_decode(B) / B
    park = t_prefill(tokens computed again) - t_min   (0 where memory is ample: the KV stays)
    G(a) = max_b sum_{k=a}^{b} P(S = k | S > a) / k / C(a, b),   D* the argmax
    base = E[1/S] / C(0, whole) at the mean prompt: what the resource earns in the main lane
    index = G(a) max(1/2, chance), chance = P(S <= D* | S > a)
The weight 1/length makes time per token the objective. Where the hazard rises G(0) is attained at the whole length, so
G(0) = base at the mean prompt. The index is less than G where the quantum may not be the end: who is parked holds memory that
others wait for, which C does not price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coldstart.scheduling.express.lengths import EDGES, Kind, Lengths
from coldstart.scheduling.express.tables import HazardTable
from coldstart.scheduling.profile import IterationProfile

OCTAVE_PARTS = 2
"""Prompts within half an octave share an index."""

TRUST_STEP = 0.1
"""Smaller changes of a class's honesty are not worth ranking everybody anew."""

LEAST_CHANCE = 0.2
"""A quantum that fewer requests end in is not looked at: with the weight 1/length a few very short ones, even those that
only the prior supposes, would make a tiny quantum worth more than the whole."""

UNSURE = 0.5
"""What an index counts at least, however unlikely its request ends in the quantum."""

_ENDLESS = 1 << 30
_SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a step costs now: `batch` requests in it, `context` tokens each in the mean, `prompt` in the mean of arrivals;
    `redo` tokens are computed again by who is parked, where memory `binds`.
    """

    batch: int = 16
    binds: bool = False
    context: float = 1.0
    prompt: float = 64.0
    redo: int | None = None

    def octave(self) -> tuple[object, ...]:
        """Equal for pressures that need no other indices."""
        return self.binds, self.batch.bit_length(), int(self.context).bit_length()


@dataclass(frozen=True, slots=True)
class Standing:
    """Requests that share an index: class, bin attained, and sizes by half octaves; `pending` 0: nothing to compute first."""

    kind: Kind
    bin: int
    prompt: int
    pending: int


@dataclass(frozen=True, slots=True)
class Worth:
    """`index` per second, attained by running until `until` tokens, by when the request has ended with that `chance`.

    To its end it earns `value`, E[1/S], and takes `cost` seconds of the contended resource.
    """

    index: float
    until: int
    chance: float
    value: float
    cost: float


def size(tokens: int) -> int:
    """Half octaves of a number of tokens; 0 for none."""
    if tokens <= 0:
        return 0
    whole = tokens.bit_length()
    return OCTAVE_PARTS * (whole - 1) + (tokens >= 1.41 * (1 << whole - 1)) + 1


def tokens_of(half_octaves: int) -> float:
    """The middle of what `size` makes alike."""
    return 0.0 if half_octaves <= 0 else max(1.0, 2.0 ** ((half_octaves - 0.5) / OCTAVE_PARTS))


class Index:
    """Indices by standing, kept until the tables or the pressure change."""

    def __init__(self, profile: IterationProfile, lengths: Lengths) -> None:
        self.profile, self.lengths = profile, lengths
        self.pressure = Pressure()
        self.live: dict[int, int] = {}
        self.version = 0
        self._seen: tuple[object, ...] = ()
        self._tables: dict[Kind, HazardTable] = {}
        self._everybody: list[float] = []
        self._found: dict[Standing, Worth] = {}
        self._trusted: dict[Kind, float] = {}
        self.base = 0.0

    @property
    def unborn(self) -> bool:
        """Whether there has been no table yet."""
        return not self._seen

    def stale(self) -> bool:
        """Whether completions since `refresh` ask for another."""
        return self._seen[:1] != (self.lengths.version,)

    def refresh(self, pressure: Pressure, live: Mapping[int, int]) -> None:
        """Take in what was learned, and the present pressure; `live`: requests under way by bin."""
        fresh = self.stale()
        seen = (self.lengths.version, *pressure.octave())
        if seen == self._seen:
            return
        self._seen, self.pressure = seen, pressure
        if fresh:
            self.live = dict(live)
            self._tables.clear()
            self._everybody = []
        self._found.clear()
        self.version += 1
        self.base = self._base()

    def worth(self, standing: Standing) -> Worth:
        found = self._found.get(standing)
        if found is None:
            found = self._found[standing] = self._worth(standing)
        return found

    def trust(self, kind: Kind, share: float) -> None:
        """Count the index of that class by so much only: its forecasts have not come true."""
        if abs(share - self._trusted.get(kind, 1.0)) > TRUST_STEP:
            self._trusted[kind] = share
            self._found.clear()
            self.version += 1

    def forget(self, kind: Kind) -> None:
        self._trusted.pop(kind, None)

    def start_s(self, pending: float) -> float:
        """What a prefill adds to an iteration."""
        added = self.profile.prefill(pending) - self.profile.shortest_s if pending > 0 else 0.0
        return max(0.0, added) + (self.unit_s() if pending > 0 else 0.0)

    def unit_s(self) -> float:
        """Seconds of a step that one request in it accounts for."""
        return self.profile.decode(self.pressure.batch) / self.pressure.batch

    def table(self, kind: Kind) -> HazardTable:
        known = self.lengths.known(kind)
        table = self._tables.get(known)
        if table is None:
            rates = self.lengths.rates(known, self.live, self._everybody)
            if known is None:
                self._everybody = rates
            table = self._tables[known] = HazardTable.of(rates)
        return table

    def _base(self) -> float:
        table, prompt = self.table(None), self.pressure.prompt
        steps = table.steps[-1]
        if self.pressure.binds:
            steps = (prompt * steps + table.held[-1]) / self.pressure.context
        return table.inverse / (self.start_s(prompt) + self.unit_s() * steps)

    def _worth(self, standing: Standing) -> Worth:
        table = self.table(standing.kind)
        a = min(standing.bin, table.bins - 1)
        prompt, unit, binds = tokens_of(standing.prompt), self.unit_s(), self.pressure.binds
        alive = table.tail[a] or 1e-12
        start = self.start_s(tokens_of(standing.pending)) * alive
        again = self.pressure.redo if self.pressure.redo is not None else prompt + EDGES[a]
        park = self.start_s(again) if binds else 0.0
        best, at = 0.0, a
        for b in range(a, table.bins):
            steps = table.steps[b + 1] - table.steps[a]
            if binds:
                steps = (prompt * steps + table.held[b + 1] - table.held[a]) / self.pressure.context
            cost = start + unit * steps + table.tail[b + 1] * park
            index = (table.value[b + 1] - table.value[a]) / (cost + 1e-12)
            if index > best * _SAME and table.tail[b + 1] <= (1 - LEAST_CHANCE) * alive:
                best, at = index, b
        until = EDGES[at + 1] if at + 1 < min(len(EDGES), table.bins) else _ENDLESS
        chance = 1 - table.tail[at + 1] / alive
        best *= self._trusted.get(standing.kind, 1.0) * max(UNSURE, chance)
        value, whole = table.value[-1] - table.value[a], table.steps[-1] - table.steps[a]
        if binds:
            whole = (prompt * whole + table.held[-1] - table.held[a]) / self.pressure.context
        return Worth(best, until, chance, value / alive, (start + unit * whole) / alive)
