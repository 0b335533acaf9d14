"""Estimate before a materialization on a GPU: the figures of the committed cost model for the given model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.key import Mismatch
from coldstart.artifacts.store import Store
from tools.bundles import KV, key, provenance

from coldstart.contract.arguments import Arguments
from coldstart.graphs.estimate import ModelShape, disk, seconds
from coldstart.materialize.expectation import Expectation, describe_nearest, estimates, expected
from coldstart.materialize.options import Options
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.paths import Cache

# Layers and bytes in bf16 of Llama2-7B, and of Llama3-70B on one of eight devices.
LLAMA = ModelShape(32, 13_476_839_424)
LARGE = ModelShape(80, 141_107_412_992 // 8, ranks=8)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)


def estimate(place: Path, *vllm_args: str, config: Any = None, size: int = 0, **options: Any) -> Any:
    if size:
        with (place / "model.safetensors").open("wb") as file:
            file.truncate(size)
    model = ResolvedModel("m", place, None, None, {"num_hidden_layers": 32} if config is None else config)
    return expected(Lookup(model, Arguments(vllm_args), Cache(place), key(), None), Options(**options))


def test_estimate_of_llama2_7b_equals_the_computed_cost(tmp_path: Path) -> None:
    ahead = estimate(tmp_path, size=LLAMA.weight_bytes, graphs=True)
    assert ahead.seconds == pytest.approx(313.0, abs=0.1)
    assert ahead.disk_bytes == pytest.approx(sum(disk(LLAMA).values()))


def test_eight_ranks_record_no_graphs(tmp_path: Path) -> None:
    ahead = estimate(
        tmp_path, "--tensor-parallel-size", "8", size=8 * LARGE.weight_bytes,
        config={"text_config": {"num_hidden_layers": 80}},
    )  # fmt: skip
    assert ahead.seconds == pytest.approx(113.3, abs=0.1)


@pytest.mark.parametrize("asked", [{"only": ("kv", "compile")}, {"eager": True}])
def test_without_graphs_only_the_starts_count(tmp_path: Path, asked: dict[str, Any]) -> None:
    words = ["--enforce-eager"] if asked.pop("eager", False) else []
    ahead = estimate(tmp_path, *words, size=LLAMA.weight_bytes, **asked)
    starts = ("cold start", "warm start for the KV size", "proof by a start")
    assert ahead == Expectation(
        pytest.approx(sum(seconds(LLAMA)[name] for name in starts), abs=0.2),
        disk(LLAMA)["compile caches"],
    )


@pytest.mark.parametrize("asked", [{"size": 0}, {"size": 9, "config": {"n_layer": 3}}])
def test_estimate_is_none_without_the_facts(tmp_path: Path, asked: dict[str, Any]) -> None:
    assert estimate(tmp_path, **asked) is None


def test_estimate_is_none_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: True)
    assert estimate(tmp_path, size=9) is None


def test_stage_estimate_is_its_last_duration(home: Path, publish: Any, model: ResolvedModel) -> None:
    earlier = publish()
    asked = Lookup(model, Arguments(), Cache.at(), earlier.key, earlier)
    assert estimates(asked) == dict(earlier.manifest.provenance.seconds) != {}
    elsewhere = replace(asked, bundle=None, nearest=earlier, mismatches=(Mismatch("hardware.cpu", "a", "b"),))
    assert estimates(elsewhere) == {} == estimates(replace(asked, bundle=None))


def test_no_duration_below_a_second_is_quoted(home: Path, model: ResolvedModel) -> None:
    with Store(home / "store").begin(key()) as draft:
        draft.add_json("kv", KV)
        spent = {"copy": 0.0, "fetch": 0.9, "load": 1.2}
        short = draft.publish(replace(provenance(), seconds=spent))
    differs = (Mismatch("model.config", "another", "this one"),)
    new = Lookup(model, Arguments(), Cache.at(), key(), nearest=short, mismatches=differs)
    assert describe_nearest(new) == {"load": f"the nearest bundle, {short.name}, took 1 s"}


def test_new_model_gets_the_durations_of_another(home: Path, publish: Any, model: ResolvedModel) -> None:
    earlier = publish()
    same = Lookup(model, Arguments(), Cache.at(), earlier.key, earlier)
    new = replace(
        same, bundle=None, nearest=earlier, mismatches=(Mismatch("model.config", "another", "this one"),)
    )
    seconds = earlier.manifest.provenance.seconds
    assert (
        describe_nearest(new)
        == {name: f"the nearest bundle, {earlier.name}, took {took:.0f} s" for name, took in seconds.items()}
        != {}
    )
    elsewhere = replace(new, mismatches=(*new.mismatches, Mismatch("hardware.cpu", "a", "b")))
    assert (
        describe_nearest(elsewhere)
        == {}
        == describe_nearest(same)
        == describe_nearest(replace(new, nearest=None))
    )
