"""The state file with the deployments, and the limits of a deployment."""

from __future__ import annotations

from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.errors import BundleError
from support.fleet_rig import deployment

from coldstart.errors import UsageError
from coldstart.fleet.live import deployments
from coldstart.fleet.live.deployments import build_deployment, parse_limits
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import FleetModel
from coldstart.host.launches import Launch
from coldstart.system.paths import Cache


def test_state_retains_deployments(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    first = FleetState(path)
    first.deploy(deployment("a", words=("--max-model-len", "64")))
    first.deploy(deployment("b"))
    first.remove("b")
    first.drain("s")
    assert first.observe_fetch("s", 10**9, 1.0) == 1e9
    assert first.observe_fetch("t", 10**9, 0.9) is None
    assert path.stat().st_mode & 0o077 == 0
    again = FleetState(path)
    assert again.models == first.models and list(again.models) == ["a"]
    assert (again.drained, again.links) == ({"s"}, {"s": 1e9})
    FleetState(None).deploy(deployment("a"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 1, "models": [{"is": "x"}], "drained": []}', "[" * 100_000],
)
def test_state_refuses_a_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot read fleet state"):
        FleetState(path)


def test_limits_as_they_are_typed() -> None:
    assert parse_limits(None) == (inf, inf) and parse_limits("ttft=2") == (2.0, inf)
    assert parse_limits("tpot=0.1,ttft=2") == (2.0, 0.1)
    for wrong in ("ttft", "ttft=0", "ttft=nan", "latency=1", "ttft=x", "tpot=", "ttft=1,"):
        with pytest.raises(UsageError, match="invalid limits") as caught:
            parse_limits(wrong)
        assert caught.value.hint == "--slo ttft=2,tpot=0.1"


ITERATIONS = {"prefill": [[1, 0.01], [512, 0.5]], "decode": [[1, 0.01], [8, 0.08]]}


@pytest.mark.parametrize(
    ("iterations", "expected"), [(ITERATIONS, (0.5, 0.08)), ({"prefill": []}, (0.0, 0.0)), (None, (0.0, 0.0))]
)
def test_deployment_has_the_measured_times_or_refuses_a_limit_on_tpot(
    iterations: Any, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(section: str) -> Any:
        if iterations is None:
            raise BundleError(f"the {section} section is missing")
        return iterations

    found = SimpleNamespace(bundle=SimpleNamespace(json=read))
    monkeypatch.setattr(deployments.profiles, "look_up_launch", lambda *_, **__: found)
    launch, cache = Launch("m", "/models/m"), Cache(tmp_path)

    def build(slo: str) -> FleetModel:
        figures: dict[str, Any] = {"memory": "2GB", "size": "1GB", "start_s": 1.0, "idle_s": 60.0, "batch": 8}
        limits = parse_limits(slo)
        return build_deployment(launch, cache, offline=True, workers=(0, 1), slo=limits, **figures).spec

    spec = build("ttft=2")
    assert (spec.costs.prefill_s, spec.costs.decode_s, spec.costs.library_s) == (*expected, 1.0)
    if expected[1]:
        assert build("ttft=2,tpot=0.1").tpot_s == 0.1
        return
    with pytest.raises(UsageError, match="a limit on TPOT needs") as caught:
        build("ttft=2,tpot=0.1")
    assert caught.value.hint == "coldstart materialize /models/m"
