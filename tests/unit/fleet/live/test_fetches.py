"""Fetches of a node: rates follow the reservations, and the fleet measures the links."""

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts import files
from support.fake_upstream import FakeServer, wait_until
from support.fleet_rig import SETTINGS, FleetStage, deployment, fleet

from coldstart.contract.weights import LimitedFetch
from coldstart.fleet.live import deployments, node
from coldstart.fleet.live.orders import RankEnded, RankFetched, RankUp
from coldstart.fleet.live.state import FleetState, ModelDeployment
from coldstart.weights.prefetch import client

ENDED = {"rate": None, "bytes": 10, "seconds": 2.0, "limited": False, "ended": True}


class Prefetcher:
    """`told` are all rate limits; what it says of a fetch is `said`, by the worker."""

    def __init__(self) -> None:
        self.told: list[LimitedFetch] = []
        self.said: dict[str, Mapping[str, Any]] = {}

    def tell(self, rate_limit: LimitedFetch) -> Mapping[str, Any] | None:
        self.told.append(rate_limit)
        if not self.told[3:]:
            raise client.PrefetchLostError("no prefetcher runs")
        return self.said.get(rate_limit.name.partition(" ")[0])

    def rate(self, worker: str) -> float | None:
        mine = [one.rate for one in self.told if one.name.startswith(worker + " ")]
        return mine[-1] if mine else -1.0


@pytest.fixture
def prefetcher(monkeypatch: pytest.MonkeyPatch) -> Prefetcher:
    made = Prefetcher()
    monkeypatch.setattr(client, "set_rate_limit", made.tell)
    return made


def fetched_from(made: ModelDeployment) -> ModelDeployment:
    return replace(made, launch=replace(made.launch, weights_from="http://weights.example"))


async def _launched(stage: FleetStage, name: str) -> FakeServer:
    asked = asyncio.create_task(stage.ask(name))
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    await wait_until(lambda: any(server.launch.name == name for server in stage.rig.servers()))
    return next(server for server in stage.rig.servers() if server.launch.name == name)


async def test_rates_follow_the_reservations_and_a_link_that_a_fetch_had_to_itself_is_measured(
    tmp_path: Path, prefetcher: Prefetcher
) -> None:
    # Slow enough that no reservation ends.
    async with fleet(tmp_path, count=1, memory=100, settings=SETTINGS, network=0.001) as stage:
        control = stage.control
        stage.rig.nodes["s0"].servers.hold = True
        for name in ("a", "b"):
            stage.deploy(fetched_from(deployment(name)))
        first = await _launched(stage, "a")
        assert first.rate_limit is not None
        assert first.rate_limit == LimitedFetch(first.rate_limit.name, frees_loaded=True)
        second = await _launched(stage, "b")
        assert second.rate_limit is not None and second.rate_limit.rate == 0.0005
        await wait_until(lambda: prefetcher.rate("a#1.0") == 0.0005)
        prefetcher.said["a#1.0"] = ENDED | {"limited": True}
        await wait_until(lambda: prefetcher.rate("b#1.0") is None)
        assert control.state.links == {}
        prefetcher.said["b#1.0"] = ENDED | {"bytes": 64 << 20}
        await wait_until(lambda: control.state.links == {"s0": float(32 << 20)})
        (server,) = control.status()["servers"]
        assert (server["network_bytes_s"], server["observed_bytes_s"]) == (0.001, 32 << 20)
        link = control.core.roster.servers["s0"].reservations.link
        assert 0.95 * (32 << 20) < link.rate <= 32 << 20
        workers = [group["workers"][0] for model in control.status()["models"] for group in model["groups"]]
        assert [worker["fetched_bytes"] for worker in workers] == [10, 64 << 20]
        # The next process knows the rate as well.
        await stage.rig.kill()
        await stage.rig.revive()
        again = stage.control
        assert again is not None and again is not control
        assert again.core.roster.servers["s0"].reservations.link.rate == link.rate


async def test_start_with_local_weights_shows_the_time_of_the_runtime(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as stage:
        control = stage.control
        made = deployment("a")
        stage.deploy(replace(made, spec=replace(made.spec, recorded={1: 2.0})))
        assert (await stage.ask("a"))[0] == 200
        up = control.workers.processes["a#1.0"].up
        assert up is not None
        before = control.core.models["a"].spec.costs.library_s
        control.workers.process_event(replace(up, start_s=8.0))
        after = control.core.models["a"].spec.costs.library_s
        # Half of the difference to 8 s less the 2 s that follow the weights.
        assert after == pytest.approx((before + 6.0) / 2)
        assert FleetState(tmp_path / "state.json").models["a"].spec.costs.library_s == after
        # A worker that is stopping can still become ready, although its model is no longer deployed.
        control.remove("a")
        control.workers.process_event(replace(up, start_s=8.0))
        assert not control.state.models


async def test_start_that_is_faster_than_its_runtime_corrects_the_time_of_the_runtime(
    tmp_path: Path, prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "FETCH_POLL_S", 0.01)
    async with fleet(tmp_path, count=1) as stage:
        control, made = stage.control, fetched_from(deployment("a"))
        costs = replace(made.spec.costs, library_s=40.0)
        stage.deploy(replace(made, spec=replace(made.spec, recorded={1: 1.0}, costs=costs)))
        assert (await stage.ask("a"))[0] == 200
        up, before = control.workers.processes["a#1.0"].up, control.core.models["a"].spec.costs.library_s
        assert up is not None and before > 5.3
        control.workers.process_event(RankFetched("a#1.0", 64 << 20, 4.0, False))
        control.workers.process_event(replace(up, start_s=5.3))
        spec = control.core.models["a"].spec
        assert spec.costs.library_s == pytest.approx((before + 4.3) / 2) and spec.joins == {}
        # The node no longer asks a prefetcher that has none of the weights of a running server.
        told = len(prefetcher.told)
        await asyncio.sleep(0.2)
        assert len(prefetcher.told) <= told + 1


async def test_observed_rate_of_a_full_disk_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with fleet(tmp_path, count=1) as stage:
        control = stage.control
        stage.deploy(deployment("a"))
        assert (await stage.ask("a"))[0] == 200
        up = control.workers.processes["a#1.0"].up
        assert up is not None
        monkeypatch.setattr(files, "write_atomic", full)
        for worker in ("a#1.0", "a#0.0"):  # the second one has stopped
            control.workers.process_event(RankFetched(worker, 64 << 20, 2.0, False))
        control.workers.process_event(replace(up, start_s=2.0 + 7.0))
        rate = control.core.roster.servers["s0"].reservations.link.rate
        assert 0.95 * (32 << 20) < rate <= 32 << 20
        assert control.core.models["a"].spec.joins == {1: pytest.approx(7.0)}
        # A request that cannot be saved is refused with the reason; the model continues to serve.
        for refused in (lambda: control.scale("a", 0, 1), lambda: control.drain("s0")):
            with pytest.raises(OSError, match="No space"):
                refused()
        assert not control.state.drained
        assert control.state.models["a"].spec.most == control.core.models["a"].spec.most == 2
        assert (await stage.ask("a"))[0] == 200


def test_rank_bytes_are_those_of_its_tensors() -> None:
    sizes = {"model.embed_tokens.weight": 100, "model.norm.weight": 4, "lm_head.weight": 60}
    sizes |= {f"model.layers.{number}.mlp.weight": 10 for number in range(3)}
    tensors = [
        {"name": name, "dtype": "U8", "shape": [size], "offset": at, "size": size}
        for (name, size), at in zip(sizes.items(), range(0, 6000, 1000), strict=True)
    ]
    plan = {"chunk": 1, "files": [{"name": "m.safetensors", "size": 6000, "tensors": tensors}]}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}

    def lookup(donor: Any, config: Any) -> Any:
        bundle = None if donor is None else SimpleNamespace(read_json=lambda name: donor)
        return SimpleNamespace(weights_donor=bundle, model=SimpleNamespace(config=config))

    # At most one rank per layer; an odd layer goes to the rank before the last.
    assert deployments.read_rank_sizes(lookup(plan, config)) == {1: (194,), 2: (120, 74), 3: (110, 10, 74)}
    # Unknown layout: each rank fetches all tensors.
    assert deployments.read_rank_sizes(lookup(plan, config | {"architectures": ["Other"]}))[2] == (194, 194)
    assert deployments.read_rank_sizes(lookup(None, config)) == {}
    assert deployments.read_rank_sizes(lookup({"files": []}, config)) == {}


async def test_next_prediction_contains_time_after_weights(tmp_path: Path, prefetcher: Prefetcher) -> None:
    async with fleet(tmp_path, count=1, memory=100) as stage:
        control = stage.control
        stage.rig.nodes["s0"].servers.hold = True
        stage.deploy(fetched_from(deployment("a", ttft_s=50.0)))
        await _launched(stage, "a")
        before = control.core.groups["a#1"].predicted_s
        prefetcher.said["a#1.0"] = ENDED
        process = control.workers.processes["a#1.0"]
        await wait_until(lambda: process.fetched is not None)
        assert process.fetched is not None
        fetched = process.fetched.seconds
        control.workers.process_event(RankUp("a#1.0", "http://127.0.0.1:9", "fresh", fetched + 7.0, 1))
        assert control.core.models["a"].spec.joins == {1: pytest.approx(7.0)}
        group = control.core.groups["a#1"]
        control.workers.process_event(RankEnded("a#1.0", "killed"))
        await wait_until(lambda: "a#2" in control.core.groups)
        after = control.core.groups["a#2"].predicted_s
        assert group.phase and before is not None and after is not None and after > before + 6.0
        # The observation survives other figures of the server and another process, but not other arguments.
        control.deploy(fetched_from(deployment("a", idle_s=5.0)))
        assert FleetState(tmp_path / "state.json").models["a"].spec.joins == {1: pytest.approx(7.0)}
        control.deploy(fetched_from(deployment("a", words=("--max-model-len", "9"))))
        assert control.core.models["a"].spec.joins == {}
