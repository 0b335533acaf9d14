"""A bench document made from runs with known figures."""

import json
from typing import Any

import pytest

from coldstart.bench import result
from coldstart.bench.measure import Run, Steady
from coldstart.bench.runner import BenchRuns
from coldstart.bench.stages import STAGES
from coldstart.bench.stats import summarize

PROOF = {"fast_path": {"compile": True}, "fallbacks": []}


def run(mode: str, number: int, seconds: float) -> Run:
    spans = [
        {"name": "until listening", "track": "harness", "start_s": 0.0, "end_s": seconds * 0.9},
        {"name": "first request", "track": "harness", "start_s": seconds * 0.9, "end_s": seconds},
        {"name": "imports <torch>", "track": "server", "start_s": 0.0, "end_s": seconds / 2},
    ]
    phases = {
        "until listening": seconds * 0.9,
        "first request": seconds * 0.1,
        "imports <torch>": seconds / 2,
    }
    steady = Steady(latency_s=0.1, one_token_s=0.01, tokens_per_s=500.0)
    return Run(
        mode,
        number,
        seconds,
        seconds / 2,
        2**29,
        2**30,
        phases,
        dict.fromkeys(STAGES, seconds / 6),
        spans,
        [((1, 2), "a")],
        steady,
        PROOF,
    )


@pytest.fixture
def document() -> dict[str, Any]:
    """vllm-warm takes 30 s, fresh 6 s, and a snapshot is impossible."""
    measured = BenchRuns(
        ["vllm-warm", "fresh", "snapshot"],
        runs={mode: [run(mode, i, s) for i in range(5)] for mode, s in (("vllm-warm", 30.0), ("fresh", 6.0))},
        unavailable={"snapshot": "no <CRIU> | here"},
        imports_s=[4.0, 5.0, 6.0],
        fork=summarize([0.01]),
    )
    made = result.document(measured, model="tiny-llama", vllm_args=[], command_line=["coldstart", "bench"])
    return json.loads(json.dumps(made))
