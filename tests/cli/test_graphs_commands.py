"""Output of the commands about a bundle's CUDA graphs; COLDSTART_REFRESH_GOLDEN=1 updates the expected files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.graphs_tools import proven
from tools.bundles import key, provenance
from tools.shell import Run

from coldstart.models.inspection import NOT_MADE
from coldstart.system import paths
from coldstart.system.paths import Cache

GOLDEN = Path(__file__).parent.parent / "golden" / "graphs" / "inspect.txt"


def publish(section: Path | None, **stages: object) -> Bundle:
    with Store(Cache.at().bundles).open_draft(key()) as draft:
        draft.add_json("stages", {"ready_s": 1.5} | stages)
        if section:
            draft.add_tree("graphs", section)
        return draft.publish(provenance(), signer=sign.load_host_key(paths.state_dir()))


def test_inspect_shows_the_graphs(run: Run, home: Path, tmp_path: Path) -> None:
    proven(tmp_path / "section")
    publish(tmp_path / "section")
    shown = run("inspect", "org/tiny").stdout
    steady = re.sub(r"\b[0-9a-f]{64}\b", "...", shown[shown.index("CUDA graphs\n") :])
    if os.environ.get("COLDSTART_REFRESH_GOLDEN"):
        GOLDEN.write_text(steady, encoding="utf-8")
    assert steady == GOLDEN.read_text(encoding="utf-8")
    data = json.loads(run("inspect", "org/tiny", "--format", "json").stdout)["graphs"]
    assert data["nodes"] == sum(data["nodes_by_kind"].values()) and data["graphs"] == 4
    assert sum(data["relocations_by_region"].values()) == data["relocations"]
    assert data["proof"]["graphs"] == 4


def test_inspect_shows_why_a_bundle_has_no_graphs(run: Run, home: Path) -> None:
    publish(None, **{NOT_MADE: {"graphs": "the installed vLLM runs on the processor"}})
    assert "no graphs  the installed vLLM runs on the processor" in run("inspect", "org/tiny").stdout
    assert json.loads(run("inspect", "org/tiny", "--format", "json").stdout)["not_made"]["graphs"]
