"""Real vLLM: four models take turns in device memory for one, and answer as before each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools import tiny_models

SCRIPT = Path(__file__).parents[3] / "support/sleep_cycles.py"
ENGINES = 4
# The allocator of a process grows for a while.
GROWTH_KIB = 64 << 10


def _run(tmp_path: Path, cycles: int, arenas: int = ENGINES) -> dict[str, Any]:
    base = tiny_models.shared("tiny-llama")
    (tmp_path / "runtime").mkdir(mode=0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("COLDSTART_SLEEP_MEMORY_BYTES", None)
    argv = [sys.executable, "-P", SCRIPT, base, tmp_path, str(cycles), str(arenas)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.vllm
@pytest.mark.parametrize("cycles", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_models_in_the_memory_of_one_answer_the_same_after_each_wake(tmp_path: Path, cycles: int) -> None:
    found = _run(tmp_path, cycles)
    assert (found["cycles"], found["differences"], found["fallbacks"]) == (cycles, 0, [])
    assert len({str(one) for one in found["answers"]}) == ENGINES, "the models must differ"
    before, after = found["before"], found["after"]
    assert after["resident_kib"] < before["resident_kib"] + GROWTH_KIB
    del before["resident_kib"], after["resident_kib"]
    assert before == after and found["records"] == ENGINES
    # A fine-tune that is given its base's copy refuses it and loads its own weights.
    assert found["refused"]["tokens_are_its_own"]
    (reason,) = found["refused"]["reasons"]
    assert reason.endswith("does not match its digest; the weights were loaded again")


@pytest.mark.vllm
def test_models_without_room_for_a_copy_load_their_weights_again(tmp_path: Path) -> None:
    found = _run(tmp_path, 8, arenas=2)
    assert (found["differences"], found["records"]) == (0, 2)
    assert found["fallbacks"] and all("evicted: another model needed" in one for one in found["fallbacks"])
