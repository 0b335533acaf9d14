"""Bytes that arrive: all, some, from each kind of source; each byte once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import pytest
from support.prefetching import Weights, check_tensors, check_whole
from support.range_server import RangeServer

from coldstart.contract.weights import PacedFetch
from coldstart.weights.prefetch import client


def test_every_byte_arrives_once(weights: Weights, server: RangeServer, runtime: Path) -> None:
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        total = sum(map(len, weights.data.values()))
        stats = attached.stats()
        assert stats["fetched_bytes"] == stats["ready_bytes"] == stats["wanted_bytes"] == total
        assert stats["refetched"] == 0 and server.total() == total


def test_a_local_directory_is_mapped_itself(weights: Weights, runtime: Path) -> None:
    with client.attach(str(weights.directory), weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        (one,) = client.request("status", directory=runtime)
        assert one["memory_bytes"] == 0


def test_a_rank_fetches_its_own_tensors_bytes_and_no_others(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    names = [name for name in weights.names("a.") if int(name[2:]) >= 30] + ["b.2", "b.7"]
    own = sum(weights.tensor(name)[2] for name in names)
    with client.attach(server.url, weights.plan, names=names, directory=runtime) as attached:
        check_tensors(attached, weights, names)
        assert server.total() == attached.stats()["fetched_bytes"]
        assert own <= server.total() <= 1.02 * own
        with pytest.raises(client.PrefetchRefusedError, match="did not request bytes"):
            attached.wait("model-00001.safetensors", 0, 8)


def test_the_foreground_of_one_comes_before_the_background_of_another(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    server.settings.rate = 4e6
    later, now = weights.names("a."), weights.names("b.")
    pace = PacedFetch("later", background=True)
    with (
        client.attach(server.url, weights.plan, names=later, pace=pace, directory=runtime) as behind,
        client.attach(server.url, weights.plan, names=now, directory=runtime) as ahead,
    ):
        begun = len(server.sent)
        check_tensors(ahead, weights, now)
        assert behind.stats()["ready_bytes"] < behind.stats()["wanted_bytes"]
        check_tensors(behind, weights, later)
    files = [entry.file for entry in server.sent]
    last = len(files) - 1 - files[::-1].index("model-00002.safetensors")
    # The streams that were under way when the foreground came, and no more.
    assert files[begun:last].count("model-00001.safetensors") <= 4


def test_early_fetch_continues_until_a_client_attaches(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    with (
        client.start_early(server.url, weights.plan, directory=runtime),
        client.attach(server.url, weights.plan, directory=runtime) as attached,
    ):
        check_whole(attached, weights)
        (model,) = client.request("status", directory=runtime)
        assert model["leases"] == 1
    assert server.total() == sum(map(len, weights.data.values()))


@pytest.mark.slow
def test_twenty_workers_share_one_copy(weights: Weights, server: RangeServer, runtime: Path) -> None:
    server.settings.rate = 20e6
    with futures.ThreadPoolExecutor(20) as pool:
        runs = [pool.submit(_worker, server.url, weights, runtime) for _ in range(20)]
        assert [run.result() for run in runs] == [0] * 20
    assert server.total() == sum(map(len, weights.data.values()))
    (model,) = client.request("status", directory=runtime)
    assert model["ready_bytes"] == server.total()


def _worker(url: str, weights: Weights, runtime: Path) -> int:
    code = (
        "import json, sys, pathlib\n"
        "from coldstart.weights.prefetch import client\n"
        "url, plan, runtime, weights = sys.argv[1:]\n"
        "plan = json.loads(pathlib.Path(plan).read_text())\n"
        "with client.attach(url, plan, directory=pathlib.Path(runtime)) as attached:\n"
        "    for file in plan['files']:\n"
        "        attached.wait(file['name'], 0, file['size'])\n"
        "        assert attached.file(file['name']) == pathlib.Path(weights, file['name']).read_bytes()\n"
    )
    plan = runtime / f"plan-{threading.get_ident()}.json"
    plan.write_text(json.dumps(weights.plan))
    arguments = [url, str(plan), str(runtime), str(weights.directory)]
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode
