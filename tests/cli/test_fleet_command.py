"""`coldstart fleet`: plans and simulations from a file, and an answer where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.shell import Run

FLEET = """
[servers.s]
count = 2
memory = "24GB"
network = "1GB"
load = "10GB"
[models.m]
size = "12GB"
memory = "14GB"
ttft_s = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return str(tmp_path / "fleet.toml")


def test_plan(run: Run, file: str) -> None:
    (model,) = json.loads(run("fleet", "plan", file, "--format", "json").stdout)["models"]
    assert model["chosen"]["ranks"] == 2 and model["chosen"]["ttft_s"] == 6.0
    assert [place["server"] for place in model["chosen"]["places"]] == ["s-0", "s-1"]
    shown = run("fleet", "plan", file).stdout
    assert "  1 ranks, 1 whole: TTFT 12.00 s, TPOT 0 ms, too slow" in shown
    assert "> 2 ranks, 1 whole: TTFT 6.00 s" in shown


def test_simulate(run: Run, file: str) -> None:
    given = ["fleet", "simulate", file, "--rate", "0.5", "--duration", "60", "--seed", "2"]
    found = json.loads(run(*given, "--format", "json").stdout)
    assert found["kind"] == "simulated fleet" and found["requests"] > 10 and found["starts"] >= 1
    assert "TTFT in SLO" in run(*given).stdout


def test_a_file_that_is_none(run: Run) -> None:
    assert "cannot read the fleet file" in run("fleet", "plan", "none.toml", code=2).stderr
    assert "cannot read the fleet file" in run("fleet", "simulate", "none.toml", code=2).stderr
