"""The state file with the deployments, and the limits of a deployment."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from support.fleet_rig import deployment

from coldstart.errors import UsageError
from coldstart.fleet.live.deployments import ttft_limit
from coldstart.fleet.live.state import FleetState


def test_state_retains_deployments(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    first = FleetState(path)
    first.deploy(deployment("a", words=("--max-model-len", "64")))
    first.deploy(deployment("b"))
    first.remove("b")
    first.drain("s")
    first.observe("s", 1e9)
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
    assert ttft_limit(None) == inf and ttft_limit("ttft=2") == 2.0
    for wrong in ("ttft", "ttft=0", "ttft=nan", "latency=1", "ttft=x"):
        with pytest.raises(UsageError, match="invalid limits"):
            ttft_limit(wrong)
    for ignored in ("tpot=0.1", "ttft=2,tpot=0.1", "tpot=0.1,ttft=2", "tpot="):
        with pytest.raises(UsageError, match="TPOT has no effect") as caught:
            ttft_limit(ignored)
        assert caught.value.hint == "--slo ttft=2"
