"""Events, orders and deployments as JSON, and the state file with the deployments."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from support.fleet_rig import deployment

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.live import wire
from coldstart.fleet.live.deployments import ttft_limit
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs, Overlap
from coldstart.host.launches import Launch

RANK = events.LaunchRank("m#1.0", "m#1", "m", 0, 2, 1, "s", 0, 10, 5, 20, inf)
SPEC = FleetModel("m", 10, 20, Costs(1.0, overlap=Overlap.SEQUENTIAL), shares={2: (4, 6)})
THINGS = [
    events.Arrived("g/1", "m"),
    events.Refuse("g/1", 429, "too many", 1.0),
    events.Joined(ServerSpec("s", 10, 1.0, 2.0)),
    events.Rebuilt((ServerSpec("s", 10, 1.0, 2.0),), (events.FoundRank(RANK, True),), ("t",)),
    events.Deployed(SPEC),
    FleetSettings(),
    RANK,
    wire.ModelDeployment(Launch("m", "/models/m", Arguments(["--max-model-len", "64"]), ("alias",)), SPEC),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda one: type(one).__name__)
def test_thing_reads_the_written_document(thing: object) -> None:
    found = wire.thing(json.loads(json.dumps(wire.document(thing))))
    assert found == thing and type(found) is type(thing)


@pytest.mark.parametrize(
    "given", [{"is": "Popen"}, {"no": "name"}, {"is": "Arrived", "request": "1", "who": 2}]
)
def test_thing_refuses_unknown_documents(given: object) -> None:
    with pytest.raises(ValueError):
        wire.thing(given)


def test_thing_names_an_invalid_member() -> None:
    with pytest.raises(UsageError, match="batch"):
        wire.thing(wire.document(SPEC) | {"batch": 0})


def test_state_retains_deployments(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    state = FleetState(path)
    state.deploy(deployment("a", words=("--max-model-len", "64")))
    state.deploy(deployment("b"))
    state.remove("b")
    state.drain("s")
    assert path.stat().st_mode & 0o077 == 0
    again = FleetState(path)
    assert again.models == state.models and list(again.models) == ["a"] and again.drained == {"s"}
    FleetState(None).deploy(deployment("a"))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema": 2}', '{"schema": 1, "models": [{"is": "x"}], "drained": []}']
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
