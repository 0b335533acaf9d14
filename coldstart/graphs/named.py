"""Memory that graphs name, so that only this memory is stored as their input.

A graph is captured after its inputs were written and overwritten before the relocations are known. The words of
the first layout are therefore read before: each symbol of a later relocation is among those that they may name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from coldstart.graphs import windows
from coldstart.graphs.inputs import Inputs
from coldstart.graphs.intervals import NONE, Intervals
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import Array, Tables


def possible_symbols(snapshot: Snapshot) -> dict[str, set[str]]:
    """Return the symbols that each graph of one layout may name: a pointer can be at any byte of a parameter."""
    tables, intervals = snapshot.tables, Intervals(snapshot.regions)
    at, by_map = windows.places(tables, 1), windows.graphs(tables, snapshot.maps["place"])
    stored = [np.frombuffer(c, np.uint8)[: len(c) // 8 * 8].view("<u8") for c in snapshot.contents.values()]
    everywhere = set().union(*(_regions(intervals, words) for words in stored)) if stored else set()
    owner, found = windows.graphs(tables, at), dict[str, set[str]]()
    for index, key in enumerate(tables.keys):
        low, high = np.searchsorted(owner, [index, index + 1])
        words = windows.values(tables.payload, at[low:high])
        mapped = snapshot.maps["address"][by_map == index]
        numbers = everywhere | _regions(intervals, words) | _regions(intervals, mapped)
        found[key] = {snapshot.regions[number].symbol for number in numbers}
    return found


def _regions(intervals: Intervals, addresses: Array) -> set[int]:
    """Return the regions that the addresses are inside, or one past the end of."""
    readings = (intervals.inside(addresses), intervals.past_end(addresses))
    return set(np.unique([r.region for r in readings]).tolist()) - {NONE}


def named_symbols(tables: Tables) -> dict[str, set[str]]:
    """Return the symbols that each graph names by relocations, also through pointers in stored contents."""
    through = _pointers(tables)
    found = {}
    for index, key in enumerate(tables.keys):
        reached = set(np.unique(tables.graph(index)[2]["region"]).tolist())
        waiting = list(reached)
        while waiting:
            new = through.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        found[key] = {tables.regions[number].symbol for number in reached}
    return found


def _pointers(tables: Tables) -> dict[int, set[int]]:
    """Return the regions that the stored contents of each region point to."""
    rows, through = tables.content_relocations, dict[int, set[int]]()
    for region, length, _, start in tables.blocks.tolist():
        mine = rows["region"][(rows["place"] >= start) & (rows["place"] < start + length)]
        through.setdefault(region, set()).update(np.unique(mine).tolist())
    return through


def narrow(inputs: Inputs, tables: Tables) -> Inputs:
    """Return the inputs in memory that the graphs of these tables name."""
    named = named_symbols(tables)
    anywhere = set().union(*named.values())
    return replace(
        inputs,
        tokens={symbol: limits for symbol, limits in inputs.tokens.items() if symbol in anywhere},
        kv=[symbol for symbol in inputs.kv if symbol in anywhere],
        static={key: _only(inputs.static.get(key, {}), symbols) for key, symbols in named.items()},
        outputs={key: inputs.outputs[key] for key in named if key in inputs.outputs},
    )


def _only(static: Mapping[str, str], symbols: Iterable[str]) -> dict[str, str]:
    return {symbol: static[symbol] for symbol in sorted(symbols) if symbol in static}
