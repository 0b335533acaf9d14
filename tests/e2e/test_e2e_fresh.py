"""A bundle is materialized and inspected, a start leaves no file behind, and one without a bundle names the difference."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.store import Store
from tools.machine import VLLM, Machine, Tokens

pytestmark = pytest.mark.vllm
SECTIONS = {"kv", "compile", "modelinfo", "weights", "iterations", "stages"}


def test_the_bundle_is_complete_and_valid(machine: Machine, bundle: Any) -> None:
    shown = json.loads(machine.run("inspect", bundle.ref, "--format", "json"))
    assert {section["type"] for section in shown["sections"]} >= SECTIONS
    assert shown["trust"]["ok"] and shown["provenance"]["arguments"] == list(VLLM)
    assert str(machine.root) not in json.dumps(shown)
    kv: Any = Store(machine.cache / "bundles").find_by_reference(bundle.ref).read_json("kv")
    # One request needs 512 tokens, and vLLM reserves a block.
    floor = (-(-512 // kv["block_tokens"]) + 1) * (kv["bytes"] // kv["blocks"])
    assert kv["ranks"] == [{"weights_bytes": 0, "kv_floor_bytes": floor}]


def test_materialize_creates_nothing_when_the_bundle_exists(machine: Machine, bundle: Any) -> None:
    again = machine.run("materialize", "tiny-llama", "-q", "--", *VLLM)
    assert again.strip().splitlines()[-1] == bundle.ref


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
