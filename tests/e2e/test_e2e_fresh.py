"""A bundle is materialized, inspected and served, and its tokens are those of stock vLLM."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.machine import VLLM, Machine, Tokens

pytestmark = pytest.mark.vllm
SECTIONS = {"kv", "compile", "modelinfo", "weights", "iterations", "stages"}
SPANS = {
    "coldstart",
    "import torch",
    "import vllm",
    "load weights",
    "restore compiled forward",
    "start engine",
    "first token",
}


def test_the_bundle_is_complete_and_valid(machine: Machine, bundle: Any) -> None:
    shown = json.loads(machine.run("inspect", bundle.ref, "--format", "json"))
    assert {section["type"] for section in shown["sections"]} >= SECTIONS
    assert shown["trust"]["ok"] and shown["provenance"]["arguments"] == list(VLLM)
    assert str(machine.root) not in json.dumps(shown)


def test_materialize_creates_nothing_when_the_bundle_exists(machine: Machine, bundle: Any) -> None:
    again = machine.run("materialize", "tiny-llama", "-q", "--", *VLLM)
    assert again.strip().splitlines()[-1] == bundle.ref


def test_fresh_answers_vllms_tokens(machine: Machine, bundle: Any, reference: Tokens, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with machine.serving("tiny-llama", "--mode", "fresh", "--timeline", str(trace)) as served:
        assert served.report["mode"] == "fresh" and served.report["canary"] is True
        assert served.report["fast_path"] == {"mode": True, "compile": True}
        assert served.report["fallbacks"] == []
        assert served.tokens() == reference
        assert served.report["url"] in served.output.read_text()
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} >= SPANS
    assert len({event["pid"] for event in events}) == 3  # the command, the server, its engine
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)


def test_a_start_leaves_no_file_behind(machine: Machine, bundle: Any, no_template: None) -> None:
    # vLLM leaves sockets there. Of coldstart one directory per user with its lock remains.
    assert {path.name for path in (machine.root / "tmp").glob("coldstart*/*")} <= {".scratch.lock"}
    assert len(list((machine.root / "tmp").glob("coldstart*"))) <= 1


def test_miss_names_the_field_without_importing_torch(machine: Machine, bundle: Any) -> None:
    other = ["--max-model-len", "256", *VLLM[2:]]
    watched = Machine(machine.root, {"PYTHONPROFILEIMPORTTIME": "1"})
    watched.run("serve", "tiny-llama", "--port", "0", "--on-miss", "fail", "--", *other, code=3)
    said = watched.error()
    assert "--max-model-len: 512 in the bundle, 256 requested" in said
    assert f"coldstart materialize tiny-llama -- {' '.join(other)}" in said
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if "import time:" in line}
    assert "coldstart.commands.cli" in imported or "coldstart" in imported
    assert not imported & {"torch", "vllm", "pandas"}


# Every interpreter of the server lacks an integration point of its start.
LACKING = """
from coldstart.vllm import compat
find = compat.find_unsupported_reason
lack = lambda feature, load=None: "it is missing, simulated" if feature == "start" else find(feature, load)
compat.find_unsupported_reason = lack
"""


@pytest.mark.nightly
def test_serve_runs_only_stock_vllm(machine: Machine, bundle: Any, reference: Tokens, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    elsewhere = replace(machine, extra={"PYTHONPATH": str(tmp_path)})
    with elsewhere.serving("tiny-llama", "--mode", "fresh") as served:
        assert {"section": "start", "reason": "it is missing, simulated; vLLM's own server runs"} in [
            dict(fallback) for fallback in served.report["fallbacks"]
        ]
        assert served.tokens() == reference
