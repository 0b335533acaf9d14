"""The state file with the deployments, and the limits of a deployment."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.errors import BundleError
from support.fleet_rig import deployment

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.fleet.live import deployments, state
from coldstart.fleet.live.deployments import build_deployment
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.sizing import Offer, choose
from coldstart.fleet.specification import DeployOptions, FleetModel, FleetSettings, parse_slo
from coldstart.host.launches import Launch
from coldstart.system.paths import Cache


def test_state_retains_deployments(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    first = FleetState(path)
    first.replace_models({"a": deployment("a", words=("--max-model-len", "64"))})
    first.drain("s")
    assert first.record_fetch("s", 10**9, 1.0) == 1e9
    assert first.record_fetch("t", 10**9, 0.9) is None
    assert path.stat().st_mode & 0o077 == 0
    again = FleetState(path)
    assert again.models == first.models and list(again.models) == ["a"]
    assert (again.drained, again.links) == ({"s"}, {"s": 1e9})
    FleetState(None).replace_models({"a": deployment("a")})


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 1, "models": [{"is": "x"}], "drained": []}', "[" * 100_000],
)
def test_state_refuses_a_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot read the fleet state"):
        FleetState(path)


def test_limits_as_they_are_typed() -> None:
    metrics = ("ttft", "tpot")
    assert parse_slo("", metrics) == {}
    assert parse_slo("tpot=0.1,ttft=2", metrics) == {"ttft": 2.0, "tpot": 0.1}
    for wrong in ("ttft", "ttft=0", "ttft=nan", "latency=1", "ttft=x", "tpot="):
        with pytest.raises(UsageError, match="expected METRIC=SECONDS") as caught:
            parse_slo(wrong, metrics)
        assert caught.value.hint == "specify limits in seconds: --slo ttft=2,tpot=0.1"


ITERATIONS = {"prefill": [[1, 0.01], [512, 0.5]], "decode": [[1, 0.01], [8, 0.08]]}


@dataclass(frozen=True)
class Found:
    """Lookup with a bundle for each number of ranks."""

    bundles: dict[int, Any]
    vllm_args: Arguments
    bundle: Any = None
    key: Any = None
    nearest: Any = None
    weights_donor: Any = None
    model: Any = field(
        default_factory=lambda: SimpleNamespace(
            path=None, revision="c0ffee", weight_files=("m.st",), config={}
        )
    )

    def refresh(self) -> Found:
        return replace(self, bundle=self.bundles.get(self.vllm_args.get_integer("pipeline_parallel_size", 1)))

    def format_command(self, name: str) -> str:
        return shlex.join(["coldstart", name, "m", "--", *self.vllm_args])


def bundle(**sections: Any) -> SimpleNamespace:
    def read(section: str) -> Any:
        if section not in sections:
            raise BundleError(f"the {section} section is missing")
        return sections[section]

    return SimpleNamespace(read_json=read)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FleetModel]:
    """Return a function that builds the specification of a deployment from the bundles by number of ranks."""

    def made(
        slo: str,
        bundles: dict[int, Any],
        start_s: float | None = None,
        config: Any = None,
        memory: str | None = "2GB",
        **launched: Any,
    ) -> FleetModel:
        launch = Launch("m", "/models/m", **launched)
        found = Found(bundles, launch.args).refresh()
        found.model.config |= config or {}
        monkeypatch.setattr(deployments.profiles, "look_up_required_bundle", lambda *_, **__: found)
        monkeypatch.setattr(deployments.keys, "compose_key", lambda *_: None)
        options = DeployOptions(slo=slo, batch=8, memory=memory, size="1GB", start_s=start_s)
        deployment = build_deployment(launch, options, Cache(tmp_path), offline=True)
        assert deployment.launch.revision == "c0ffee", "workers that start later must have the same weights"
        return deployment.spec

    return made


def test_gpu_memory_that_is_held_twice_excludes_shared_weights(
    build: Callable[..., FleetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*words: str, config: Any = None, source: str | None = "https://weights") -> float:
        return build("", {1: bundle()}, 9.0, config, args=Arguments(words), weights_from=source).held_twice

    monkeypatch.setattr(deployments.runtime, "targets_cpu", lambda: False)
    assert held() == 1.0
    monkeypatch.setenv("COLDSTART_SHARE_GPU_WEIGHTS", "1")
    assert held() == pytest.approx(0.5)  # the model needs 2 GB, half of it for weights
    experts = {"text_config": {"num_experts": 8}}
    assert held(source=None) == held("--quantization", "fp8") == held(config=experts) == 1.0


@pytest.mark.parametrize(
    ("kv_bytes", "memory"), [(1 << 20, (4 << 30) + (7 << 20)), (1 << 30, 9 << 30), (None, 9 << 30)]
)
def test_gpu_worker_gets_kv_cache_for_its_requests(
    kv_bytes: int | None, memory: int, build: Callable[..., FleetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments.runtime, "targets_cpu", lambda: False)
    needs = {"device_bytes": 9 << 30, "device_floor_bytes": 4 << 30, "kv_floor_bytes": kv_bytes}
    stages = {"memory_bytes": 1 << 30, "ready_s": 2.0} | needs
    assert build("", {1: bundle(stages=stages)}, memory=None).memory == memory


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"iterations": ITERATIONS}, (0.5, 0.08)),
        ({"iterations": {"prefill": []}}, (0.0, 0.0)),
        ({}, (0.0, 0.0)),
    ],
)
def test_deployment_has_the_measured_times_or_refuses_a_limit_on_tpot(
    sections: Any, expected: tuple[float, float], build: Callable[..., FleetModel]
) -> None:
    bundles = {1: bundle(**sections)}
    spec = build("ttft=2", bundles, start_s=1.0)
    assert (spec.costs.prefill_s, spec.costs.decode_s, spec.costs.library_s) == (*expected, 1.0)
    if expected[1]:
        assert build("ttft=2,tpot=0.1", bundles, start_s=1.0).tpot_s == 0.1
        return
    with pytest.raises(UsageError, match="a TPOT limit requires") as caught:
        build("ttft=2,tpot=0.1", bundles, start_s=1.0)
    assert caught.value.hint == "run `coldstart materialize /models/m`"


def stages(ready_s: float, **spans: float) -> Any:
    named = {name.replace("_", " "): seconds for name, seconds in spans.items()}
    return {"ready_s": ready_s, "memory_bytes": 1 << 30, "spans": named}


def test_pipeline_has_cost_of_its_bundle_or_reason_why_it_has_none(build: Callable[..., FleetModel]) -> None:
    """One worker: 12 s, of which 1 s loads weights and 3 s follow them. Two ranks compile, 30 s by both together."""
    one = bundle(iterations=ITERATIONS, stages=stages(12.0, load_the_model=1.0, compile_or_warm_up=3.0))
    two = bundle(stages=stages(24.0, load_the_model=1.0, compile_or_warm_up=30.0))
    spec = build("ttft=20", {1: one, 2: two})
    assert (spec.costs.library_s, spec.recorded) == (8.0, {1: 3.0, 2: 24.0 - 0.5 - 8.0})
    assert list(spec.unavailable) == [3, 4]
    assert "`coldstart materialize m -- --pipeline-parallel-size 4`" in spec.unavailable[4]
    assert state.decode(state.encode(spec), FleetModel) == spec
    offers = [Offer(name, 4e7, 1e10, 1 << 40) for name in "ab"]
    # 25 s of fetch and 3 s more; the ranks need 12.5 s and 15.5 s more, which misses the limit as well.
    found = choose(spec, offers, FleetSettings())
    assert found is not None and len(found.places) == 1 and "3 ranks: no bundle" in found.reason
    ready = bundle(stages=stages(13.0, load_the_model=1.0, compile_or_warm_up=8.0))
    found = choose(build("ttft=20", {1: one, 2: ready}), offers, FleetSettings())
    assert found is not None and len(found.places) == 2
    own = build("ttft=20", {1: one}, args=Arguments(("--pipeline-parallel-size", "2")), start_s=1.0)
    assert set(own.unavailable.values()) == {"the model's arguments already set --pipeline-parallel-size"}
