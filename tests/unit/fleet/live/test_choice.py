"""The live fleet chooses the number of ranks and their memory by Algorithm 1, and reports the reason."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands.fleet import render
from support.fake_upstream import wait_until
from support.fleet_rig import SETTINGS, FleetStage, deployment, fleet

from coldstart.fleet.specification import Costs, FleetSettings

# Llama2-7B on A10 (tables 1 and 2 of the paper), in units of 1,000 bytes; an iteration of 30 ms, so that the three
# objectives differ.
SIZE, LINK, START_S, PREFILL_S, DECODE_S, HOP_S, TTFT_S = 12_500, 2000.0, 4.0, 1.5, 0.030, 0.001, 7.5
BY_PAPER = {0.010: (1, 1), 0.040: (2, 2), 0.200: (2, 0)}


def paper(tpot_s: float, least_full: int) -> tuple[int, int]:
    """Return (s, w) of Algorithm 1 with equations 5 and 2 of the paper, for equal servers."""
    for s in range(1, 5):
        for w in range(least_full if s > 1 else 1, s + 1):
            pace = s - w + w / s
            ttft = max(START_S, SIZE / s / LINK) + PREFILL_S * pace + HOP_S * s
            if ttft <= TTFT_S and DECODE_S * pace + HOP_S * s <= tpot_s:
                return s, w
    return 1, 1


def test_objectives_by_hand() -> None:
    """One worker needs 6.25 + 1.5 s; two ranks need 4 s, and 3 s, 2.25 s or 1.5 s with none, one or two full workers.

    A token then takes 60, 45 or 30 ms and two hops.
    """
    assert {limit: paper(limit, 0) for limit in BY_PAPER} == BY_PAPER
    assert paper(0.200, 1) == (2, 1)


async def _start(stage: FleetStage, tpot_s: float) -> tuple[int, int]:
    """Deploy the model with the limit, and return (s, w) of the group that its first request starts."""
    costs = Costs(library_s=START_S, prefill_s=PREFILL_S, decode_s=DECODE_S, hop_s=HOP_S)
    made = deployment("m", words=("--kv-cache-memory-bytes", "1000"), ttft_s=TTFT_S, tpot_s=tpot_s)
    stage.deploy(replace(made, spec=replace(made.spec, size=SIZE, memory=18_000, costs=costs)))
    asked = asyncio.create_task(stage.ask("m"))
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    await wait_until(lambda: stage.control.core.groups)
    (group,) = stage.control.core.groups.values()
    await wait_until(lambda: len(list(stage.rig.servers())) == len(group.workers))
    launched = [server.launch.args for server in stage.rig.servers()]
    sizes = {args.get_integer("pipeline_parallel_size", 1) for args in launched}
    assert sizes == {len(group.workers)} == {len(launched)}
    # A rank has the KV of its layers only.
    assert {args.get_integer("kv_cache_memory_bytes", 0) for args in launched} == {1000 // len(launched)}
    return len(group.workers), sum(worker.full for worker in group.workers)


@pytest.mark.parametrize("consolidate", [False, True])
@pytest.mark.parametrize("tpot_s", BY_PAPER)
async def test_objective_changes_the_started_pipeline_as_in_the_paper(
    tmp_path: Path, tpot_s: float, consolidate: bool
) -> None:
    settings = FleetSettings(consolidate=consolidate)
    async with fleet(tmp_path, 4, 30_000, settings=settings, network=LINK) as stage:
        for node in stage.rig.nodes.values():
            node.servers.hold = True
        chosen = await _start(stage, tpot_s)
        # A pipeline that is consolidated needs a worker to consolidate into.
        assert chosen == paper(tpot_s, least_full=int(consolidate))
        status = stage.control.status()
        (group,) = status["models"][0]["groups"]
        assert group["choice"] in render(status)
        reason = "meets the limits; first token" if chosen[0] == 1 else "responds after 7.8 s, a pipeline"
        assert reason in group["choice"]


async def test_one_worker_where_pipelines_are_not_allowed(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, 30_000, settings=SETTINGS, network=LINK) as stage:
        assert await _start(stage, 0.2) == (1, 1)


async def test_hops_of_servers_are_measured_once_for_each_pair(tmp_path: Path) -> None:
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with listening, fleet(tmp_path, 3) as stage:
        control, calls = stage.control, list[Any]()
        for node in stage.rig.nodes.values():
            node.place = listening.sockets[0].getsockname()[:2]
            time_hops = node.node.time_hops

            async def count(places: Any, measure: Any = time_hops) -> Any:
                calls.append(places)
                return await measure(places)

            node.node.time_hops = count  # type: ignore[method-assign]
            control.lose_server(node.spec.name)
        for node in stage.rig.nodes.values():
            control.add_server(node.spec, node)
        await wait_until(lambda: len(control.core.roster.hops) == 3)
        assert sorted(map(len, calls)) == [1, 2]
        assert all(server["hop_s"] > 0 for server in control.status()["servers"])
        control.lose_server("s1")
        assert control.core.roster.hops.keys() == {("s0", "s2")}
