"""`coldstart fleet`: plans and simulations from a file, and an answer where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
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


def test_a_manifest_for_either_operator(run: Run) -> None:
    common = ["--image", "example.com/coldstart:1", "--bundle", "oci://example.com/a:v1"]
    shown = run(
        "fleet", "manifest", "--for", "kuberay", *common, "--device-memory", "24GB", "--gpus", "1"
    ).stdout
    ray, service = yaml.safe_load_all(shown)
    assert (ray["kind"], service["kind"]) == ("RayCluster", "Service")
    assert ray["spec"]["workerGroupSpecs"][0]["labels"]["coldstart-memory"] == str(24 * 10**9)
    given = ["fleet", "manifest", "m", "--for", "lws", *common, "--ranks", "2", "--format", "json"]
    lws = json.loads(run(*given, "--", "--max-model-len", "64").stdout)["documents"][0]
    assert lws["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert "one model" in run("fleet", "manifest", "--for", "lws", *common, code=2).stderr
    assert "--device-memory" in run("fleet", "manifest", "--for", "kuberay", *common, code=2).stderr
    wrong = run("fleet", "manifest", "m", "--for", "kuberay", *common, "--device-memory", "1GB", code=2)
    assert "deployed to it" in wrong.stderr
