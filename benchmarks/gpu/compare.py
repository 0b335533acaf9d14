"""Three ways to tell pointers from constants, judged by the differential one.

prefix        the paper's section 4: an 8-byte word that begins like an address
single        a word inside memory that is live in one capture
differential  two captures whose bases differ (classify.py)
A constant called a pointer is corrupted at restore; a pointer called a constant dangles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coldstart.graphs import windows
from coldstart.graphs.classify import Classified, differential
from coldstart.graphs.sides import Side, Symbols
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import ABSOLUTE, Array

PREFIX_SHIFT = 40


@dataclass(frozen=True)
class Score:
    """Counts of words; `corrupted` are constants, `noise` are padding, `missed` are proven pointers."""

    classifier: str
    called: int
    corrupted: int
    noise: int
    missed: int


def prefix(snapshot: Snapshot) -> Array:
    """Places of 8-aligned words that share the high bytes of some region's base."""
    at = windows.places(snapshot.tables)
    at = at[at % 8 == 0]
    bases = [*(r.base for r in snapshot.regions), *(r.base for r in snapshot.ranges)]
    heads = np.array(sorted({base >> PREFIX_SHIFT for base in bases}), np.uint64)
    found = windows.values(snapshot.tables.payload, at) >> np.uint64(PREFIX_SHIFT)
    called: Array = at[np.isin(found, heads)]
    return called


def single(snapshot: Snapshot) -> Array:
    """Places of windows inside live memory of this one capture; aligned ones win where two overlap."""
    at = windows.places(snapshot.tables)
    hit = at[Side(snapshot, Symbols([])).hits(windows.values(snapshot.tables.payload, at))]
    aligned = hit[hit % 8 == 0]
    rest = hit[hit % 8 != 0]
    return np.sort(np.concatenate([aligned, rest[~np.isin(rest, [*(aligned - 4), *(aligned + 4)])]]))


def compare(a: Snapshot, b: Snapshot) -> list[Score]:
    """One line per classifier. Raises BaseCollisionError."""
    truth = differential(a, b, Symbols([]))
    pointers = truth.place[truth.kind == ABSOLUTE]
    ways = {"prefix": prefix(a), "single": single(a), "differential": pointers}
    return [_score(name, called, truth, a, b) for name, called in ways.items()]


def _score(name: str, called: Array, truth: Classified, a: Snapshot, b: Snapshot) -> Score:
    wrong = called[~np.isin(called, truth.place)]
    equal = windows.values(a.tables.payload, wrong) == windows.values(b.tables.payload, wrong)
    missed = int((~np.isin(truth.place, called)).sum()) if name != "differential" else 0
    return Score(name, len(called), int(equal.sum()), int((~equal).sum()), missed)
