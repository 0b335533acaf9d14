"""The models of a host's command line start with the arguments of their bundles, like those of `serve`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.commands import cli
from support.engines import home
from support.recorded_models import engine, model
from tools.recorded import publish_recorded

from coldstart.host.live import profiles, run

__all__ = ["engine", "home", "model"]
SHORT, LONG = ("--max-model-len", "512"), ("--max-model-len", "1024")


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the host by a list of the configurations that it received."""
    received: list[Any] = []

    def host(file: Any, *_: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: received.append(file) or 0)

    monkeypatch.setattr(run, "ModelHost", host)
    monkeypatch.setattr(profiles.criu, "missing", lambda: "not here")
    return received


@pytest.mark.parametrize(("words", "expected"), [((), SHORT), (("--", *LONG), LONG)])
def test_a_model_starts_with_the_arguments_of_its_newest_bundle_unless_some_are_typed(
    model: str, hosted: list[Any], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: Any
) -> None:
    bundle = publish_recorded(model, SHORT)
    publish_recorded(model, LONG, created="2020-01-01T00:00:00Z")
    with pytest.raises(SystemExit) as ended:
        cli.main(["host", model, "--memory", "8GiB", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 0, said
    (launch,) = hosted[0].catalogue.launches.values()
    assert tuple(launch.args) == expected
    note = f"Using the arguments of {bundle.name}:v{bundle.version}: --max-model-len 512"
    assert (note in said) is (words == ())
