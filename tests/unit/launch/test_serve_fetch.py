"""Source of the weights: our load format if it fits, a plan from the bundle, and a fetch before the server's imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import FieldMismatch
from safetensors.numpy import save_file
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.launch import fetch, planning
from coldstart.launch.planning import ServeRequest
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights
from coldstart.weights.prefetch import client

Publish = Callable[..., Bundle]
ZEROS = "sha256:" + "0" * 64
SOURCE = "http://weights.example/tiny"
OURS = Arguments(["--load-format", "coldstart"])
NONE = Arguments()
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 5}
NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(5)),
    "model.norm.weight",
    "lm_head.weight",
]


def planned(names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Return a weights plan of one file with a tensor of four bytes per name."""
    tensors = [
        {"name": name, "dtype": "F32", "shape": [1], "offset": 8 + 4 * at, "size": 4, "digest": ZEROS}
        for at, name in enumerate(names)
    ]
    chunks = [ZEROS.removeprefix("sha256:")] * (1 + len(names))
    file = {"name": "model.safetensors", "size": 8 + 4 * len(names), "chunks": chunks, "tensors": tensors}
    return {"chunk": weights.CHUNK, "files": [file]}


class Prefetcher:
    """Fake client: `asked` lists the requests, `closed` counts returned leases."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.closed = refuses, 0
        self.asked: list[tuple[str, Any, list[str], dict[str, Any]]] = []

    def start_early_fetch(self, source: str, plan: Any, names: list[str], **more: Any) -> Prefetcher:
        if self.refuses:
            raise client.PrefetchRefusedError("no room")
        self.asked.append((source, plan, names, more))
        return self

    def attach(self, source: str, plan: Any, *, names: list[str], **more: Any) -> Prefetcher:
        return self.start_early_fetch(source, plan, names, **more)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Prefetcher]:
    """Return use(refuses=False), which installs a fake prefetcher."""

    def install(refuses: bool = False) -> Prefetcher:
        made = Prefetcher(refuses)
        monkeypatch.setattr(client, "start_early_fetch", made.start_early_fetch)
        monkeypatch.setattr(client, "attach", made.attach)
        return made

    return install


def chosen(
    plan: object, model: ResolvedModel, root: Path, given: Arguments = NONE, source: str = SOURCE
) -> fetch.ServerWeights:
    """Return the weights of a start from a bundle with this `weights` section and the cache `root`."""
    donor = cast(Any, SimpleNamespace(ref="tiny:v1", read_json=lambda name: plan))
    return fetch.choose_weights_source(BundleLookup(model, given, Cache(root), key(seed=1), donor), source)


def requested(source: str, plan: dict[str, Any], root: Path) -> WeightsRequest:
    """Return the request for the weights of `plan`."""
    request = chosen(plan, ResolvedModel("tiny", root, None, None, {}), root, source=source).request
    assert request is not None
    return request


@pytest.fixture
def streaming(home: Path) -> LaunchPlan:
    """A plan whose weights come from SOURCE."""
    return LaunchPlan(OURS, weights_from=requested(SOURCE, planned(), home))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A model directory with the tensors of NAMES."""
    save_file({name: np.ones(1, dtype=np.float32) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path


Use = Callable[..., Prefetcher]


@pytest.mark.parametrize(
    ("build", "is_installed", "expected"),
    [("cuda", True, ["--load-format", "instanttensor"]), ("cuda", False, []), ("hip", True, [])],
)
def test_a_gpu_loads_with_instanttensor_where_vllm_can(
    local: Path,
    model: ResolvedModel,
    monkeypatch: pytest.MonkeyPatch,
    build: str,
    is_installed: bool,
    expected: list[str],
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.13.0", build: "13.0"})
    monkeypatch.setattr(fetch, "find_spec", lambda name: object() if is_installed else None)
    sound = replace(model, path=local)
    assert fetch.build_loader_arguments(NONE, sound) == expected
    assert fetch.build_loader_arguments(Arguments(["--load-format", "auto"]), sound) == []
    assert (
        fetch.build_loader_arguments(NONE, model) == []
    )  # the fixture's file is not in the safetensors format


def _missed(model: ResolvedModel, nearest: Bundle | None, *mismatches: FieldMismatch) -> BundleLookup:
    return BundleLookup(model, NONE, Cache.at(), key(seed=1), None, nearest, mismatches)


ABSENT = FieldMismatch("model.weights", None, "U8")
FLAG = FieldMismatch("engine.seed", 1, None)


def test_a_later_node_of_a_pipeline_loads_after_it_is_up_and_has_its_weights_on_their_way_until_then(
    streaming: LaunchPlan, use: Use
) -> None:
    prefetcher = use()
    words = ["--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"]
    later = replace(streaming, vllm_args=Arguments([*OURS, *words, "--headless"]))
    with fetch.start_early_fetch(later, LLAMA) as early:
        retained = early.pop_all()
    assert prefetcher.closed == 0
    with fetch.start_early_fetch(later, LLAMA):
        pass  # the server did not start
    assert prefetcher.closed == 1
    retained.close()
    assert prefetcher.closed == 2


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["-pp", "2"], NAMES),
        (["-pp", "2", "--nnodes", "2"], NAMES[:4]),
        (["-pp", "2", "--nnodes", "2", "--node-rank", "1"], NAMES[4:]),
        (["-pp", "2", "-tp", "2", "--nnodes", "4", "--node-rank", "1"], NAMES[:4]),
        (["-pp", "2", "--nnodes", "2", "--speculative-config", '{"method": "ngram"}'], NAMES),
        # vLLM must report these errors.
        (["-pp", "2", "--nnodes", "2", "--node-rank", "5"], NAMES),
        (["-pp", "2", "--nnodes", "0"], NAMES),
    ],
)
def test_node_requests_the_tensors_of_its_ranks(
    streaming: LaunchPlan, use: Use, given: list[str], names: list[str]
) -> None:
    prefetcher = use()
    with fetch.start_early_fetch(replace(streaming, vllm_args=OURS.append(*given)), LLAMA):
        assert [asked[2] for asked in prefetcher.asked] == [names]


class Reader:
    """Fake of PageIn."""

    def __init__(self, made: list[Reader], paths: Any, tensors: Any) -> None:
        self.paths, self.names, self.ended = paths, {tensor.name for tensor in tensors}, False
        made.append(self)

    def end(self) -> None:
        self.ended = True


def test_local_files_are_read_ahead_from_a_size_on(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Reader] = []
    monkeypatch.setattr("coldstart.weights.load.tensor_sources.PageIn", lambda *args: Reader(readers, *args))
    made = LaunchPlan(Arguments(["--model", str(local), *OURS, "-pp", "2", "-n", "2"]))
    with fetch.start_early_fetch(made, LLAMA):
        assert readers == []  # too few bytes for readahead
    monkeypatch.setattr(fetch, "PAGE_IN_MIN_BYTES", 1)
    with pytest.raises(KeyboardInterrupt), fetch.start_early_fetch(made, LLAMA):
        (reader,) = readers
        assert reader.paths == {"model.safetensors": local / "model.safetensors"}
        assert reader.names == set(NAMES[:4]) and not reader.ended
        raise KeyboardInterrupt
    assert reader.ended


def _planned(found: BundleLookup) -> LaunchPlan:
    return planning.plan(ServeRequest(found, without_bundle=True, weights_from=SOURCE))


@pytest.mark.usefixtures("home")
def test_source_without_any_plan_of_the_weights_is_named_and_the_directory_read(model: ResolvedModel) -> None:
    made = _planned(_missed(model, None))
    assert made.weights_from is None and made.vllm_args[:2] == ("--model", str(model.path))
    assert [step.stage for step in made.fallbacks] == ["bundle", "weights"]
    reason = made.fallbacks[1].reason
    assert SOURCE in reason and "weights are read from the model's directory" in reason


def test_start_without_bundle_streams_by_another_bundles_plan(publish: Publish, model: ResolvedModel) -> None:
    bundle = publish(weights=planned())
    made = _planned(_missed(model, bundle, FLAG, ABSENT))
    asked = made.weights_from
    assert asked is not None and asked.source == SOURCE and made.weights == weights.compute_digest(planned())
    assert made.vllm_args[:2] == OURS and [step.stage for step in made.fallbacks] == ["bundle"]
