"""Units of a fetch: exactly the wanted bytes, each verified, without a deadlock."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from typing import Any

from coldstart.weights.prefetch import region_layout
from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.schedule import Board, Lease, pick

CHUNK = 100
# Cheap, and each finds what others do not: all of them, in one case.
SEEDS = range(300)


def _tensor(name: str, offset: int, data: bytes) -> dict[str, Any]:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    place = {"offset": offset, "size": len(data)}
    return {"name": name, "dtype": "U8", "shape": [len(data)], **place, "digest": digest}


def _made(chance: random.Random) -> tuple[region_layout.RegionLayout, bytes]:
    """Return a file of random tensors after a header, in the layout of safetensors."""
    at = header = chance.randrange(1, 2 * CHUNK)
    sizes = [
        chance.choice([0, 1, 7, CHUNK, chance.randrange(5 * CHUNK)]) for _ in range(chance.randrange(1, 9))
    ]
    data = chance.randbytes(header + sum(sizes))
    tensors: list[dict[str, Any]] = []
    for number, size in enumerate(sizes):
        tensors.append(_tensor(f"t{number}", at, data[at : at + size]))
        at += size
    borders = [0, *(tensor["offset"] for tensor in tensors), len(data)]
    starts = [i for start, stop in pairwise(borders) for i in range(start, stop, CHUNK)]
    chunks = [hashlib.sha256(data[a:b]).hexdigest() for a, b in pairwise([*starts, len(data)])]
    file = {"name": "f", "size": len(data), "chunks": chunks, "tensors": tensors}
    return region_layout.read({"chunk": CHUNK, "files": [file]}), data


def _fetch_all(board: Board, lease: Lease, data: bytes) -> int:
    """Run a lease like the service, check all verified bytes, and return the number of fetched bytes."""
    fetched = 0
    while chosen := pick([lease], lambda _: True):
        unit = chosen[1].unit
        fetched += unit.size
        assert unit.size == sum(check.end - check.start for check in unit.checks) <= CHUNK
        assert list(Ranges((check.start, check.end) for check in unit.checks)) == list(unit.pieces)
        for check in unit.checks:
            assert hashlib.sha256(data[check.start : check.end]).hexdigest() == check.digest
        board.publish(chosen[1])
    return fetched


def _want(board: Board, names: list[str] | None, *, background: bool = False) -> Lease:
    wanted = board.layout.wanted(names)
    return Lease(board, board.want(wanted, board.new_units(wanted)), background=background)


def test_wants_are_met_exactly_and_everything_is_checked() -> None:
    for seed in SEEDS:
        _meets_wants(seed)


def _meets_wants(seed: int) -> None:
    chance = random.Random(seed)
    made, data = _made(chance)
    board = Board(made)
    names = list(made.tensors)
    first = [name for name in names if chance.random() < 0.5]
    rest = [name for name in names if name not in first]
    lease = _want(board, first)
    own = sum(made.tensors[name].end - made.tensors[name].offset for name in first)
    assert _fetch_all(board, lease, data) == (len(data) if len(first) == len(names) else own)
    lease = _want(board, rest, background=chance.random() < 0.5)
    _fetch_all(board, lease, data)
    assert all(board.ready[0].covers(t.offset, t.end) for t in made.tensors.values())
    left = len(data) - board.ready_bytes
    lease = _want(board, None)
    assert _fetch_all(board, lease, data) == left
    assert board.ready[0].covers(0, len(data)) and board.ready_bytes == board.planned_bytes == len(data)
    assert not lease.has_unfinished()


def test_released_units_are_planned_again() -> None:
    for seed in SEEDS:
        _releases(seed)


def _releases(seed: int) -> None:
    chance = random.Random(seed)
    made, data = _made(chance)
    board = Board(made)
    names = list(made.tensors)
    kept = [name for name in names if chance.random() < 0.4]
    first = _want(board, [name for name in names if chance.random() < 0.3])
    gone = _want(board, None)
    stays = _want(board, kept)
    if chosen := pick([gone], lambda _: True):
        board.publish(chosen[1])
    first.release()
    gone.release()
    _fetch_all(board, stays, data)
    assert all(board.ready[0].covers(made.tensors[n].offset, made.tensors[n].end) for n in kept)
    assert board.planned_bytes == board.ready_bytes and not stays.has_unfinished()
    stays.release()
    stays = _want(board, None)
    _fetch_all(board, stays, data)
    assert board.ready_bytes == len(data)
