"""A fleet's state file of an older commit (f886570) is still read."""

from __future__ import annotations

from math import inf
from pathlib import Path

from coldstart.fleet.live.state import FleetState


def test_fleet_state_is_complete_when_an_older_commit_wrote_it() -> None:
    state = FleetState(Path(__file__).with_name("fleet-state-v1.json"))
    (deployed,) = state.models.values()
    assert (deployed.launch.model, deployed.spec.name, deployed.spec.ttft_s) == ("llama", "llama", inf)
    assert (deployed.spec.costs.library_s, deployed.spec.batch) == (0.1, 2)
    assert (state.drained, state.links) == ({"two"}, {"one": 1e9})
