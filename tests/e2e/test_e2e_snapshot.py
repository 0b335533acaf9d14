"""A frozen engine thaws where nothing runs, as often as is wanted, at any address."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools.machine import VLLM, Machine, Tokens, criu

from coldstart.machine import criu as engine_criu

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def frozen(machine: Machine, made: Any) -> str:
    """The bundle with a snapshot: the next version of the same key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engine_criu.VARIABLE, criu() or "")
        if (reason := engine_criu.missing()) is not None:
            pytest.skip(reason)
    said = json.loads(machine.run("materialize", "tiny-llama", "--snapshot", "--format", "json", "--", *VLLM))
    assert said["key"] == made.key
    return str(said["ref"])


def test_two_servers_thaw_at_once(machine: Machine, frozen: str, reference: Tokens) -> None:
    with (
        machine.serving("tiny-llama", "--mode", "snapshot") as one,
        machine.serving("tiny-llama", "--mode", "snapshot") as two,
    ):
        for served in (one, two):
            assert served.report["mode"] == "snapshot" and served.report["fallbacks"] == []
            assert served.report["fast_path"] == {"mode": True, "compile": True}
        assert one.tokens() == two.tokens() == reference
    assert list((machine.root / "run" / "coldstart").glob("thawed-*")) == []


def test_the_other_sections_are_taken_over(machine: Machine, frozen: str, made: Any) -> None:
    difference = json.loads(machine.run("inspect", made.ref, "--diff", frozen, "--format", "json"))
    assert "snapshot" in json.dumps(difference) and "compile" not in json.dumps(difference)


def test_without_criu_the_start_is_fresh_and_says_why(
    machine: Machine, frozen: str, reference: Tokens
) -> None:
    without = Machine(machine.root, {engine_criu.VARIABLE: "/nonexistent/criu"})
    with without.serving("tiny-llama", "--mode", "snapshot") as served:
        assert served.report["mode"] == "fresh"
        assert "/nonexistent/criu is not to be found" in served.report["fallbacks"][0]["reason"]
        assert served.tokens() == reference
