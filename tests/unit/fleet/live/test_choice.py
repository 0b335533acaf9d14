"""The live fleet chooses the number of ranks and their memory by Algorithm 1, and reports the reason."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands.fleet import render
from support.fake_upstream import wait_until
from support.fleet_rig import SETTINGS, FleetStage, deployment, fleet
from tools.tiny_models import write_empty

from coldstart.contract.arguments import Arguments
from coldstart.fleet.live.deployments import compute_held_twice
from coldstart.fleet.specification import Costs, FleetSettings
from coldstart.host.live.starter import build_request
from coldstart.launch import planning
from coldstart.system import runtime
from coldstart.system.devices import nvml
from coldstart.system.ipc.addresses import find_free_port

# Llama2-7B on A10 (tables 1 and 2 of the paper), in units of 1,000 bytes; an iteration of 30 ms, so that the three
# objectives differ.
SIZE, LINK, START_S, PREFILL_S, DECODE_S, HOP_S, TTFT_S = 12_500, 2000.0, 4.0, 1.5, 0.030, 0.001, 7.5
# (s, w) by Algorithm 1 with equations 5 and 2 of the paper. One worker needs 6.25 + 1.5 s; two ranks need 4 s, and 3 s,
# 2.25 s or 1.5 s with none, one or two full workers. A token then takes 60, 45 or 30 ms and two hops.
BY_PAPER = {0.010: (1, 1), 0.040: (2, 2), 0.200: (2, 0)}


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
        assert chosen == (BY_PAPER[tpot_s][0], max(BY_PAPER[tpot_s][1], int(consolidate)))
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
        assert all(0 < server["hop_s"] < 1 for server in control.status()["servers"])
        # Nothing listens at this place.
        assert await node.node.time_hops([("127.0.0.1", find_free_port("127.0.0.1"))]) == [None]
        control.lose_server("s1")
        assert control.core.roster.hops.keys() == {("s0", "s2")}


GPU, CONTEXT = 80 << 30, 2 << 30
LIMITS = {(): 0.92, ("--kv-cache-memory-bytes", "8000000000"): 0.92, ("--gpu-memory-utilization", "0.3"): 0.3}


@pytest.mark.vllm
@pytest.mark.parametrize(("words", "shared"), [*((words, False) for words in LIMITS), ((), True)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
async def test_rank_and_the_full_worker_beside_it_fit_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, words: tuple[str, ...], shared: bool
) -> None:
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    def request(args: Arguments, free: int, external: int = 0) -> int:
        share = args.get_value("gpu_memory_utilization", CacheConfig().gpu_memory_utilization)
        found = MemorySnapshot(device="cuda", auto_measure=False, total_memory=GPU, free_memory=free)
        return request_memory(found, CacheConfig(gpu_memory_utilization=share), external)

    model, others = str(write_empty(tmp_path / "model")), {2, 3, 4} - {ranks}
    made = deployment("m", words=words, ttft_s=15.0, least=1, most=1)
    launch = replace(made.launch, model=model, on_miss="warn")
    # With shared weights, two workers fit that would otherwise need more than the GPU.
    spec = replace(made.spec, size=24 << 30, memory=(54 if shared else 48) << 30, held_twice=1.0)
    spec = replace(spec, held_twice=compute_held_twice(spec) if shared else 1.0)
    spec = replace(spec, unavailable=dict.fromkeys(others, "other size"))
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "targets_cpu", lambda: False)
        async with fleet(tmp_path, ranks, GPU - 2 * CONTEXT, settings=FleetSettings(), network=2e9) as stage:
            for node in stage.rig.nodes.values():
                node.node.selects_device = True
            stage.deploy(replace(made, launch=launch, spec=spec))
            await wait_until(lambda: len(list(stage.rig.servers())) == ranks + 1)
            (node,) = (one for one in stage.rig.nodes.values() if len(one.servers.begun) == 2)
    monkeypatch.setattr(nvml, "list_gpus", lambda: [nvml.Gpu("H", None, "9.0", GPU, "580")])
    own = {"cache": str(tmp_path / "cache"), "offline": True}
    orders = [replace(server.order, **own) for server in node.servers.begun]
    rank, full = (planning.plan(build_request(order, order.listen)).vllm_args for order in orders)
    defers = replace(orders[0], launch=replace(orders[0].launch, defer_capture=True))
    assert (
        build_request(defers).defer_capture
        and not build_request(replace(defers, template="runtime")).defer_capture
    )
    asked = request(rank, GPU - CONTEXT)
    external = spec.ranks(ranks)[0] if shared else 0
    assert asked <= spec.part(ranks)
    assert request(full, GPU - 2 * CONTEXT - asked, external) <= spec.memory - external
    assert [("COLDSTART_WEIGHTS_SOCKET" in server.env) for server in node.servers.begun] == [shared] * 2
    # What the user typed, or vLLM's default, remains the upper limit, of all ranks together.
    assert Arguments().gpu_memory_share() == CacheConfig().gpu_memory_utilization
    assert (
        full.gpu_memory_share() <= LIMITS[words] and rank.gpu_memory_share() <= LIMITS[words] / ranks + 1e-4
    )
