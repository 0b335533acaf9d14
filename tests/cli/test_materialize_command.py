"""coldstart materialize: what it says of a bundle that it made, and of one that it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts.store import Store
from coldstart.commands import cli
from tools.bundles import publish

from coldstart.machine.paths import Cache
from coldstart.materialize import materialize
from coldstart.model import tiny


@pytest.mark.parametrize("there", [False, True])
def test_a_bundle_that_was_there_is_not_said_to_be_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    # Built for real it takes seconds, and nothing here looks at it.
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
    assert ("Found" if there else "Made") in printed.err
