"""A start without vLLM's integration points runs stock vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.machine import Machine, Tokens

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
# Every interpreter of the server lacks an integration point of its start.
LACKING = """
from coldstart.vllm import compat
check = compat.check
compat.check = lambda feature, load=None: "It is missing, simulated." if feature == "start" else check(feature, load)
"""


def test_serve_runs_stock_vllm_without_the_integration_point(
    machine: Machine, bundle: Any, reference: Tokens, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    elsewhere = replace(machine, extra={"PYTHONPATH": str(tmp_path)})
    with elsewhere.serving("tiny-llama", "--mode", "fresh") as served:
        assert {"section": "start", "reason": "It is missing, simulated. vLLM's own server runs."} in [
            dict(fallback) for fallback in served.report["fallbacks"]
        ]
        assert served.tokens() == reference
