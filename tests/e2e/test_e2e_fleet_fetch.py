"""Weights that a fleet's servers fetch over links that they share: a real Ray of three nodes, real prefetchers and source.

Model servers need no model: each fetches its rank's tensors as `coldstart serve` does, and is ready when they are there.
"""

from __future__ import annotations

import json
import time
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
from support.fleet_on_ray import Fleet, of_two
from support.fleet_rig import deployment
from support.range_server import RangeServer, serving

from coldstart.weights import weights_plan
from coldstart.weights.load import stage, tensors
from coldstart.weights.prefetch import client
from coldstart.weights.prefetch.paces import BURST_S

# Found, not imported: ray changes the environment, by which templates are judged.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
# Of a server's link, in bytes/s. Each of a fetch's four streams may have one piece of 1 MiB in hand.
LINK, IN_HAND = 1.6e6, 4 << 20
SOURCE = 2.4e6
PATIENCE_S = 120


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory without weights, those on a server, and what each rank of two needs of them in bytes."""

    directory: Path
    source: RangeServer
    whole: int
    ranks: tuple[int, int]

    def deployed(self, fleet: Fleet, name: str, **given: Any) -> None:
        """From an address of its own, so that no other model's bytes are taken for its."""
        made = deployment(name, **given)
        with suppress(FileExistsError):
            (self.source.directory / name).symlink_to(".")
        launch = replace(made.launch, model=str(self.directory), weights_from=f"{self.source.url}/{name}")
        shares = {1: (self.whole,), 2: self.ranks}
        spec = replace(made.spec, size=self.whole, memory=self.whole, shares=shares)
        fleet.order("deploy", replace(made, launch=launch, spec=spec))
        # Known to the gateway too.
        while name not in [one["id"] for one in fleet.asked("/v1/models")["data"]]:
            time.sleep(0.1)


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
    plan = weights_plan.plan(weights)
    (directory / "plan.json").write_text(json.dumps(plan))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names = [tensor.name for tensor in tensors.list_tensors(plan)]
    first, second = (
        sum(sizes[name] for name in stage.select_names(names, CONFIG, [rank], 2)) for rank in (0, 1)
    )
    with serving(weights) as source:
        yield Checkpoint(directory, source, sum(sizes.values()), (first, second))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers behind slow links, by their own account, and a head that is none."""
    with of_two(tmp_path_factory.mktemp("fleet"), 2, f"{LINK:.0f}B", "64MB") as made:
        try:
            yield made
        finally:
            _forget(made)


def _forget(fleet: Fleet) -> None:
    """End the prefetchers, and their memory with them."""
    for name in ("one", "two"):
        with suppress(client.PrefetchError):
            client.request("stop", directory=fleet.runtime / name / "coldstart")


def _workers(status: Any, model: str) -> list[Any]:
    return [
        worker
        for one in status["models"]
        if one["name"] == model
        for group in one["groups"]
        if not group["name"].endswith("/whole")
        for worker in group["workers"]
    ]


def _alone(groups: list[Any]) -> list[str]:
    """The name of the only group, once it is a whole one."""
    names = [group["name"] for group in groups]
    return names if len(names) == 1 and names[0].endswith("/whole") else []


def _fetched(workers: list[Any], count: int) -> list[Any]:
    """All of them, once each of so many has fetched."""
    done = [worker for worker in workers if worker["fetched_bytes"]]
    return done if len(done) == count else []


def test_each_rank_fetches_its_own_layers_and_the_rest_comes_behind(
    fleet: Fleet, checkpoint: Checkpoint
) -> None:
    # So slow that the pipeline is looked at before the whole model is there; one link alone could not keep the limit.
    checkpoint.source.settings.rate = SOURCE
    checkpoint.deployed(fleet, "split", ttft_s=checkpoint.whole / LINK - 1)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(fleet.ask, "split")
        workers, _ = fleet.until(lambda status: _fetched(_workers(status, "split"), 2), PATIENCE_S)
        assert [worker["fetched_bytes"] for worker in workers] == list(checkpoint.ranks)
        assert asked.result()["model"] == "split"
    # The whole model beside one of the ranks: what that rank has is not fetched again.
    (left,), _ = fleet.until(lambda status: _alone(fleet.groups(status, "split")))
    other = checkpoint.ranks[0 if ".1" in left else 1]
    header = (checkpoint.source.directory / "model.safetensors").stat().st_size - checkpoint.whole
    assert checkpoint.source.total("model.safetensors") == checkpoint.whole + other + header
    # Each had its link to itself, and what it got is believed from now on: here the source was slower than the links.
    for server in fleet.status()["servers"]:
        assert server["network_bytes_s"] == LINK and 0 < server["observed_bytes_s"] < SOURCE
    fleet.order("remove", "split")
    fleet.until(lambda status: not fleet.groups(status, "split"))


def test_two_that_fetch_over_one_link_keep_to_their_halves(fleet: Fleet, checkpoint: Checkpoint) -> None:
    _forget(fleet)
    server, other = fleet.status()["servers"]
    first, link = server["name"], server["observed_bytes_s"]
    fleet.order("drain", other["name"])
    # Whole, for no limit asks for more; at first the source is slow, so that the two do meet.
    checkpoint.source.settings.rate = 2e5
    for name in ("left", "right"):
        checkpoint.deployed(fleet, name)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(fleet.ask, name) for name in ("left", "right")]
        fleet.until(lambda status: _workers(status, "left") and _workers(status, "right"), PATIENCE_S)
        # Time in which the prefetcher comes up and is told both rates; what comes meanwhile is no part of it worth the name.
        time.sleep(5)
        checkpoint.source.settings.rate = None
        workers, _ = fleet.until(
            lambda status: _fetched(_workers(status, "left") + _workers(status, "right"), 2),
            PATIENCE_S,
        )
        assert [one.result()["model"] for one in asked] == ["left", "right"]
    assert {worker["server"] for worker in workers} == {first}
    last = max(workers, key=lambda worker: worker["fetched_s"])
    assert last["fetched_bytes"] <= link / 2 * (last["fetched_s"] + BURST_S) + IN_HAND
