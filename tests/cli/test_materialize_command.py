"""coldstart materialize: messages about a created bundle, an existing bundle, and missing sections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from coldstart.commands import cli
from tools.bundles import key, provenance, publish

from coldstart.materialize import materialize
from coldstart.materialize.options import Options
from coldstart.models import inspection, tiny
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache


@pytest.fixture
def model(home: Path) -> Path:
    """Create a model directory without weights."""
    directory = home / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return directory


@pytest.mark.parametrize("there", [False, True])
def test_materialize_reports_whether_the_bundle_existed(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    # Building the model takes seconds, and this test does not read it.
    monkeypatch.setattr(tiny, "build", lambda name, models: model)
    store = Store(Cache.at().bundles)
    early = publish(store, home / "scratch") if there else None
    monkeypatch.setattr(
        materialize, "materialize", lambda asked, options, phase: early or publish(store, home / "scratch")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["materialize", "tiny-llama", "--format", "json"])
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert json.loads(printed.out)["made"] is not there
    assert ("Found" if there else "Built") in printed.err


def test_materialize_reports_missing_sections(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Options] = []

    def make(lookup: Lookup, options: Options, phase: object) -> Bundle:
        asked.append(options)
        with Store(Cache.at().bundles).open_draft(key()) as draft:
            draft.add_json("iterations", {"prefill": [[1, 0.5]], "left_out": {"prefill": [512, 1024]}})
            draft.add_json("stages", {inspection.NOT_MADE: {"compile": "PicklingError"}})
            return draft.publish(provenance())

    monkeypatch.setattr(materialize, "materialize", make)
    with pytest.raises(SystemExit):
        cli.main(["materialize", str(model), "--profile-seconds", "30"])
    said = capsys.readouterr().err
    assert asked[0].profile_s == 30
    assert "no compile: PicklingError" in said and "no prefill of 512, 1024" in said


def test_dry_run_names_the_snapshot_and_the_whole_command(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "build", lambda name, models: model)
    with pytest.raises(SystemExit):
        cli.main(["materialize", "tiny-llama", "--dry-run", "--snapshot"])
    printed = capsys.readouterr()
    assert "stages, snapshot" in printed.out and "coldstart materialize tiny-llama --snapshot" in printed.err
