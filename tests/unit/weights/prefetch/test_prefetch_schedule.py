"""Schedule of a fetch: exactly the wanted bytes, each verified, without a deadlock."""

import hashlib
import json
import os
import random
import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from mmap import PAGESIZE
from pathlib import Path
from random import Random
from threading import Condition
from typing import Any

import pytest
from support.prefetching import CHUNK as FILE_CHUNK
from support.prefetching import Weights, check_whole
from support.range_server import RangeServer

from coldstart.contract.weights import LimitedFetch
from coldstart.weights.checkpoint import list_tensors
from coldstart.weights.load.tensor_sources import PrefetchSource
from coldstart.weights.prefetch import client, layout
from coldstart.weights.prefetch.fetcher import Fetcher
from coldstart.weights.prefetch.layout import RegionLayout
from coldstart.weights.prefetch.rate_limits import BURST_S, FetchRateLimiter, TokenBucket
from coldstart.weights.prefetch.schedule import CheckState, FetchSchedule, Lease

CHUNK = 100
# Cheap, and each finds what others do not: all of them, in one case.
SEEDS = range(300)


def _tensor(name: str, offset: int, data: bytes) -> dict[str, Any]:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    place = {"offset": offset, "size": len(data)}
    return {"name": name, "dtype": "U8", "shape": [len(data)], **place, "digest": digest}


def _made(chance: random.Random, longest: int = 5) -> tuple[RegionLayout, dict[str, tuple[int, int]], bytes]:
    """Return a file of random tensors after a header, in the layout of safetensors, with offset and size of each."""
    at = header = chance.randrange(1, 2 * CHUNK)
    sizes = [
        chance.choice([0, 1, 7, CHUNK, chance.randrange(longest * CHUNK)])
        for _ in range(chance.randrange(1, 9))
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
    places = {tensor["name"]: (tensor["offset"], tensor["size"]) for tensor in tensors}
    return layout.build_layout({"chunk": CHUNK, "files": [file]}), places, data


def _fetch_all(board: FetchSchedule, lease: Lease, data: bytes) -> int:
    """Run a lease like the service, check all verified bytes, and return the number of fetched bytes."""
    fetched = 0
    while run := board.pick_run([lease], lambda _: True):
        checks = board.layout.checks[run.start : run.stop]
        assert checks[-1].end - checks[0].start == board.layout.count_bytes(run) <= CHUNK
        for check in checks:
            assert hashlib.sha256(data[check.start : check.end]).hexdigest() == check.digest
        fetched += board.layout.count_bytes(run)
        board.set_state(run, CheckState.READY)
    assert not board.is_unfinished(lease)
    return fetched


def _want(board: FetchSchedule, names: list[str] | None, *, background: bool = False) -> Lease:
    wanted = board.layout.select_checks(names)
    board.request_checks(wanted)
    return Lease(wanted, background=background)


def _has(board: FetchSchedule, offset: int, size: int) -> bool:
    return set(board.layout.find_covering_checks("f", offset, size)) <= set(
        board.list_checks(CheckState.READY)
    )


def test_wants_are_met_exactly_and_everything_is_checked() -> None:
    for seed in SEEDS:
        chance = random.Random(seed)
        made, places, data = _made(chance)
        board = FetchSchedule(made)
        first = [name for name in places if chance.random() < 0.5]
        rest = [name for name in places if name not in first]
        lease = _want(board, first)
        own = sum(places[name][1] for name in first)
        assert _fetch_all(board, lease, data) == (len(data) if len(first) == len(places) else own)
        lease = _want(board, rest, background=chance.random() < 0.5)
        _fetch_all(board, lease, data)
        assert all(_has(board, *place) for place in places.values())
        left = len(data) - board.ready_bytes
        lease = _want(board, None)
        assert _fetch_all(board, lease, data) == left
        assert _has(board, 0, len(data)) and board.ready_bytes == board.wanted_bytes == len(data)
        freed = made.select_checks([name for name in first if places[name][1]])
        board.set_state(freed, CheckState.FREED)
        assert board.ready_bytes == board.wanted_bytes == len(data) - made.count_bytes(freed)
        assert not board.is_unfinished(lease)
        assert _fetch_all(board, _want(board, None), data) == made.count_bytes(freed)


def test_checks_of_a_released_lease_are_fetched_for_a_later_one() -> None:
    for seed in SEEDS:
        chance = random.Random(seed)
        made, places, data = _made(chance)
        board = FetchSchedule(made)
        gone = _want(board, None)
        kept = _want(board, [name for name in places if chance.random() < 0.4])
        if run := board.pick_run([gone], lambda _: True):
            board.set_state(run, CheckState.IDLE if chance.random() < 0.5 else CheckState.FAILED)
        kept = _want(board, [made.checks[n].tensor.name for n in kept.wanted if made.checks[n].tensor])
        fetched = _fetch_all(board, kept, data)
        assert fetched == made.count_bytes(kept.wanted) == board.ready_bytes
        assert _fetch_all(board, _want(board, None), data) == len(data) - fetched


def test_freed_pages_contain_nothing_that_is_still_needed() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        made, places, data = _made(chance, longest=200)
        tensors = [_tensor(name, at, data[at : at + size]) for name, (at, size) in places.items()]
        chunks = [check.digest for check in made.checks]
        plan = {
            "chunk": CHUNK,
            "files": [{"name": "f", "size": len(data), "chunks": chunks, "tensors": tensors}],
        }
        held, limit = Condition(), LimitedFetch("", frees_loaded=True)
        fetch = Fetcher(
            "http://x", json.dumps(plan).encode(), held, streams=0, budget=len(data), patience_s=1
        )
        region = fetch.region
        assert region is not None
        kept, reader = bytearray(data), region.open_reader()
        with held:
            lease = fetch.create_lease(None, FetchRateLimiter(None), {}, limits=limit)
            region.write(0, memoryview(data))
            fetch.board.set_state(range(len(made.checks)), CheckState.READY)
            for name in chance.sample(sorted(places), len(places)):
                fetch.free_tensor(lease, name)
                at, size = places[name]
                kept[at : at + size] = bytes(size)
                now = os.pread(reader, len(data), 0)
                assert all(one == was or not was for one, was in zip(now, kept, strict=True))
        os.close(reader)
        header = min(at for at, _ in places.values())
        assert region.allocated_bytes <= -(-header // PAGESIZE) * PAGESIZE


def test_a_fetch_stops_at_the_bytes_that_it_may_hold_until_a_client_waits(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    held, limit = 0, LimitedFetch("worker", most_held_bytes=1 << 20)
    with client.start_early_fetch(server.url, weights.plan, rate_limit=limit, directory=runtime):
        while held < 1 << 20:
            held = sum(one.get("ready_bytes", 0) for one in client.request("status", directory=runtime))
        for _ in range(20):
            (one,) = client.request("status", directory=runtime)
            assert one["ready_bytes"] < (1 << 20) + 4 * FILE_CHUNK
        with client.attach(server.url, weights.plan, rate_limit=limit, directory=runtime) as attached:
            check_whole(attached, weights)


@pytest.mark.parametrize("is_shared", [False, True])
def test_loaded_tensors_are_freed_unless_a_view_or_another_client_needs_them(
    weights: Weights, server: RangeServer, runtime: Path, is_shared: bool
) -> None:
    torch = pytest.importorskip("torch")

    def attach() -> client.WeightsLease:
        limit = LimitedFetch("worker", frees_loaded=True)
        return client.attach(server.url, weights.plan, rate_limit=limit, directory=runtime)

    tensors, kept = list_tensors(weights.plan), list[tuple[Any, bytes]]()
    fetched = weights.names("b.")
    with client.attach(server.url, weights.plan, names=fetched, directory=runtime) as first:
        first.wait_for_tensors()
    while client.request("status", directory=runtime)[0]["leases"]:
        pass
    with attach() if is_shared else nullcontext() as other:
        source = PrefetchSource(attach(), frees_loaded=True)
        ordered = source.sort_tensors(tensors)
        if not is_shared:  # the other client may have fetched any; the first is empty
            assert [one.name for one in ordered if one.size][: len(fetched) - 1] == fetched[1:]
        for number, tensor in enumerate(ordered):
            expected = weights.data[tensor.file][tensor.offset : tensor.offset + tensor.size]
            view = source.get_bytes(tensor)
            assert view == expected
            if number % 5 == 0 and expected:
                kept.append((torch.frombuffer(view, dtype=torch.uint8).view(-1, 2)[1:], expected[2:]))
            del view
        source.close()
        with pytest.raises(client.PrefetchRefusedError):
            source.attached.wait_for_bytes(tensor.file, tensor.offset, 1)
        while (one := client.request("status", directory=runtime)[0])["leases"] > is_shared:
            pass
        if other is not None:
            check_whole(other, weights)
    total = sum(map(len, weights.data.values()))
    assert all(bytes(view.flatten().numpy()) == expected for view, expected in kept)
    pages = sum(len(expected) + 2 * PAGESIZE for _, expected in kept) + 4 * PAGESIZE
    assert one["memory_bytes"] >= total if is_shared else one["memory_bytes"] <= pages
    with attach() as again:
        check_whole(again, weights)
    assert server.total() - total == (0 if is_shared else total - one["ready_bytes"])


def test_a_bucket_never_lets_more_through_than_its_rate_and_never_less() -> None:
    for seed in range(200):
        chance = Random(seed)
        bucket, now, spent, allowed = TokenBucket(100.0), 0.0, 0, 0.0
        rate = 100.0
        for _ in range(50):
            size = chance.randrange(1, 60)
            bucket.consume(size, now)
            spent += size
            waited = bucket.wait_s(now)
            allowed, now = allowed + rate * waited, now + waited
            # A busy reader passes exactly at the rate.
            assert spent == pytest.approx(allowed)
            if chance.random() < 0.2:
                rate = chance.choice([20.0, 100.0, 900.0])
                bucket.set_rate(rate, now)


def test_prefetcher_follows_a_changed_rate(weights: Weights, server: RangeServer, runtime: Path) -> None:
    rate, began = 200e3, time.monotonic()
    rate_limit = LimitedFetch("worker", rate)
    with client.start_early_fetch(server.url, weights.plan, rate_limit=rate_limit, directory=runtime):
        said: dict[str, Any] = {"bytes": 0}
        while said["bytes"] < 300e3:
            with suppress(client.PrefetchLostError):  # the prefetcher has not started yet
                said = client.set_rate_limit(rate_limit, directory=runtime) or said
            time.sleep(0.02)
        # Each stream holds at most one more piece.
        assert said["bytes"] <= rate * (time.monotonic() - began + BURST_S) + 4 * 256e3
        assert said["limited"] and not said["ended"]
        with client.attach(server.url, weights.plan, rate_limit=rate_limit, directory=runtime) as attached:
            client.set_rate_limit(LimitedFetch("worker", None), directory=runtime)
            check_whole(attached, weights)
        said = client.set_rate_limit(LimitedFetch("worker", None), directory=runtime) or {}
        assert said["ended"] and said["bytes"] == sum(map(len, weights.data.values()))


@pytest.mark.parametrize("rate", [0, -1, "fast", True])
def test_invalid_rate_is_refused(weights: Weights, runtime: Path, rate: object) -> None:
    with (
        client.attach(str(weights.directory), weights.plan, directory=runtime),
        pytest.raises(client.PrefetchError),
    ):
        client.set_rate_limit(LimitedFetch("worker", rate), directory=runtime)  # type: ignore[arg-type]
