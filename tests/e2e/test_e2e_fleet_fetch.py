"""Pipelines of a fleet become one worker, and fetch weights over shared links: real Ray, prefetchers and source.

The model servers need no model: each fetches its rank's tensors like `coldstart serve` and is ready when they are there.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.fleet_on_ray import Fleet, Streaming, two_node_fleet
from support.fleet_rig import deployment
from support.range_server import RangeServer, run_server

from coldstart.weights import weights_plan
from coldstart.weights.checkpoint import list_tensors
from coldstart.weights.load import stage
from coldstart.weights.prefetch import client

# ray is not imported: it changes the environment, on which templates depend.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
# Rate of a server's link in bytes/s.
LINK = 1.6e6
SOURCE = 2.4e6
PATIENCE_S = 120


@dataclass(frozen=True)
class Checkpoint:
    """A model directory without weights, the server of the weights, and the bytes of each of two ranks."""

    directory: Path
    source: RangeServer
    whole: int
    ranks: tuple[int, int]

    def deploy(self, fleet: Fleet, name: str, **given: Any) -> None:
        """Deploy from a separate address, so that the bytes of each model are counted separately."""
        made = deployment(name, **given)
        with suppress(FileExistsError):
            (self.source.directory / name).symlink_to(".")
        launch = replace(made.launch, model=str(self.directory), weights_from=f"{self.source.url}/{name}")
        shares = {1: (self.whole,), 2: self.ranks}
        spec = replace(made.spec, size=self.whole, memory=self.whole, shares=shares)
        fleet.order("deploy", deployment=replace(made, launch=launch, spec=spec))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    weights, directory = (tmp_path_factory.mktemp(name) for name in ("weights", "model"))
    layers = {f"model.layers.{n}.mlp.weight": 1 << 20 for n in range(8)}
    sizes = {
        "model.embed_tokens.weight": 128 << 10,
        **layers,
        "model.norm.weight": 1024,
        "lm_head.weight": 128 << 10,
    }
    save_file(
        {name: torch.randint(255, (size,), dtype=torch.uint8) for name, size in sizes.items()},
        weights / "model.safetensors",
    )
    plan = weights_plan.build_plan(weights)
    (directory / "plan.json").write_text(json.dumps(plan))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names = [tensor.name for tensor in list_tensors(plan)]
    first, second = (
        sum(sizes[name] for name in stage.select_tensor_names(names, CONFIG, [rank], 2)) for rank in (0, 1)
    )
    with run_server(weights) as source:
        yield Checkpoint(directory, source, sum(sizes.values()), (first, second))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers that report slow links, and a head without a server."""
    with two_node_fleet(tmp_path_factory.mktemp("fleet"), 2, f"{LINK:.0f}B", "64MB") as made:
        yield made
        for name in ("one", "two"):  # frees the memory of the prefetchers
            with suppress(client.PrefetchError):
                client.request("stop", directory=made.runtime / name / "coldstart")


def _fetched(groups: list[Any]) -> list[Any]:
    """Return the two workers of the pipeline once both have fetched."""
    workers = [worker for group in groups if group["replaces"] is None for worker in group["workers"]]
    return workers if [bool(worker["fetched_bytes"]) for worker in workers] == [True, True] else []


def _alone(groups: list[Any]) -> list[str]:
    """Return the server of the only group if it has replaced a pipeline."""
    return [group["workers"][0]["server"] for group in groups if len(groups) == 1 and group["replaces"]]


def test_a_pipeline_becomes_one_worker_under_its_streams(fleet: Fleet) -> None:
    """Two ranks on two nodes; the new engine takes a second to start."""
    (memory,) = {tuple(one["free_bytes"]) for one in fleet.status()["servers"]}
    size = int(2 * LINK)
    made = deployment("p", words=("--max-model-len", "1000"), ttft_s=1.9, least=1, most=1, batch=20)
    fleet.order("deploy", deployment=replace(made, spec=replace(made.spec, size=size, memory=size)))
    fleet.wait_until(lambda status: [g["phase"] for g in fleet.groups(status, "p")][:1] == ["serving"])
    pipeline, single = fleet.groups(fleet.status(), "p")
    assert "the limit is 1.9 s" in pipeline["choice"]
    # The nodes have measured the time to each other.
    fleet.wait_until(lambda status: all(0 < (one["hop_s"] or 0) < 1 for one in status["servers"]))
    assert single["replaces"] == pipeline["name"]
    assert len({worker["server"] for worker in pipeline["workers"]}) == 2
    with Streaming(fleet, "p", 10, 200):
        fleet.wait_until(lambda status: status["gateway"]["migrated"] == 10)
    alone = fleet.wait_until(lambda status: (g := fleet.groups(status, "p")) and len(g) == 1 and g)[0][0]
    assert alone["name"] == single["name"] and alone["url"] != pipeline["url"]
    left = [[memory[0] - size], [*memory]]
    fleet.wait_until(lambda status: sorted(one["free_bytes"] for one in status["servers"]) == left)
    fleet.order("remove", model="p")
    fleet.wait_until(lambda status: not fleet.groups(status, "p"))


def test_each_rank_fetches_its_own_layers_and_rest_comes_behind(fleet: Fleet, checkpoint: Checkpoint) -> None:
    # Slow enough to observe the pipeline before the full model is there; one link alone could not meet the limit.
    checkpoint.source.settings.rate = SOURCE
    checkpoint.deploy(fleet, "split", ttft_s=checkpoint.whole / LINK - 1)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(fleet.ask, "split")
        workers, _ = fleet.wait_until(lambda status: _fetched(fleet.groups(status, "split")), PATIENCE_S)
        assert [worker["fetched_bytes"] for worker in workers] == list(checkpoint.ranks)
        assert asked.result()["model"] == "split"
    # The full model starts beside one of the ranks, whose tensors are not fetched again.
    (left,), _ = fleet.wait_until(lambda status: _alone(fleet.groups(status, "split")))
    other = checkpoint.ranks[1 if left == workers[0]["server"] else 0]
    header = (checkpoint.source.directory / "model.safetensors").stat().st_size - checkpoint.whole
    assert checkpoint.source.total("model.safetensors") == checkpoint.whole + other + header
    # The observed rates are those of the source, which was slower than the links.
    for server in fleet.status()["servers"]:
        assert server["network_bytes_s"] == LINK and 0 < server["observed_bytes_s"] < SOURCE
    fleet.order("remove", model="split")
    fleet.wait_until(lambda status: not fleet.groups(status, "split"))
