"""Model servers of one machine: each end is reported once, and ranks of a pipeline receive their positions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from support.fake_upstream import FakeServers
from support.fleet_rig import deployment

from coldstart.fleet.events import LaunchRank
from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import RankEnded, RankOrder, RankUp
from coldstart.system.ipc.addresses import find_free_port


def _order(
    worker: str = "a#1.0", rank: int = 0, ranks: int = 1, master: tuple[str, int] | None = None
) -> RankOrder:
    launched = LaunchRank(worker, "a#1", "a", rank, ranks, 1, "s", 0, 10, 10, 10, inf)
    return RankOrder(launched, deployment("a", words=("--max-model-len", "64")).launch, 60.0, 120.0, master)


async def test_a_server_comes_up_and_goes(tmp_path: Path) -> None:
    servers = FakeServers(tmp_path)
    node = NodeServers("127.0.0.1", servers)
    await node.launch(_order())
    await node.launch(_order())
    assert [up for _, up in (await node.report()).workers] == [None]
    ((number, up),) = await node.read_events(0)
    assert isinstance(up, RankUp) and up.mode == "fake" and up.url.startswith("http://127.0.0.1:")
    assert len(servers.begun) == 1
    report = await node.report()
    ((found, known),) = report.workers
    assert report.seq == number and known == up and found.ready and not found.stopping
    await node.stop("a#1.0")
    ((_, ended),) = await node.read_events(number)
    assert isinstance(ended, RankEnded) and not ended.hung
    assert await node.read_events((await node.report()).seq, 0.01) == []
    await node.stop("nobody")
    assert (await node.read_events((await node.report()).seq - 1))[0][1] == RankEnded(
        "nobody", "unknown worker"
    )


async def test_hop_is_the_time_in_which_a_connection_opens(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    place = server.sockets[0].getsockname()[:2]
    async with server:
        node = NodeServers("127.0.0.1", FakeServers(tmp_path))
        # Nothing listens at the second place.
        found, missing = await node.time_hops([place, ("127.0.0.1", find_free_port("127.0.0.1"))])
    assert found is not None and 0 < found < 1.0 and missing is None


@pytest.mark.parametrize("words", [(), ("--api-key", "own")])
async def test_each_server_has_a_key_that_only_its_report_tells(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    servers = FakeServers(tmp_path)
    node = NodeServers("127.0.0.1", servers)
    keys = set()
    for worker in ("a", "b"):
        order = _order(worker)
        await node.launch(replace(order, launch=deployment("a", words=words).launch))
        ((_, up),) = await node.read_events((await node.report()).seq)
        assert isinstance(up, RankUp) and up.key == servers.begun[-1].env["VLLM_API_KEY"]
        assert up.key not in repr(up)
        keys.add(up.key)
    assert keys == {"own"} if words else len(keys) == 2 and min(map(len, keys)) == 64
    await node.clear()
