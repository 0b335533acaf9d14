"""Bytes that arrive: all, some, from each kind of source; each byte once."""

from __future__ import annotations

from pathlib import Path

from prefetching import Weights, check_tensors, check_whole
from tools.range_server import RangeServer

from coldstart.prefetch import client


def test_every_byte_arrives_once(weights: Weights, server: RangeServer, runtime: Path) -> None:
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        total = sum(map(len, weights.data.values()))
        stats = attached.stats()
        assert stats["fetched_bytes"] == stats["ready_bytes"] == stats["wanted_bytes"] == total
        assert stats["refetched"] == 0 and server.total() == total
        assert attached.finished()


def test_a_local_directory_is_mapped_itself(weights: Weights, runtime: Path) -> None:
    with client.attach(str(weights.directory), weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        assert client.request("status", directory=runtime)["memory_bytes"] == 0
