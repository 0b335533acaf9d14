"""The models of a host's command line start with the arguments of their bundles, like those of `serve`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recorded_models import engine, model, publish_recorded
from tools.command_line import main

from coldstart.host.live import profiles, run

__all__ = ["engine", "model"]
SHORT, LONG = ("--max-model-len", "512"), ("--max-model-len", "1024")


@pytest.fixture
def sources() -> list[Any]:
    """Return the list of the functions with which a host reads its configuration again."""
    return []


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch, sources: list[Any]) -> list[Any]:
    """Replace the host by a list of the configurations that it received."""
    received: list[Any] = []

    def host(file: Any, source: Any, *_: object, **__: object) -> SimpleNamespace:
        sources.append(source)
        return SimpleNamespace(run=lambda: received.append(file) or 0)

    monkeypatch.setattr(run, "ModelHost", host)
    return received


@pytest.mark.parametrize(("words", "expected"), [((), SHORT), (("--", *LONG), LONG)])
def test_a_model_starts_with_the_arguments_of_its_newest_bundle_unless_some_are_typed(
    model: str, hosted: list[Any], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: Any
) -> None:
    bundle = publish_recorded(model, SHORT)
    publish_recorded(model, LONG, created="2020-01-01T00:00:00Z")
    code = main("host", model, "--memory", "8GiB", *words)
    said = capsys.readouterr().err
    assert code == 0, said
    (launch,) = hosted[0].catalogue.launches.values()
    assert tuple(launch.args) == expected
    note = f"Using the arguments of {bundle.name}:v{bundle.version}: --max-model-len 512\n"
    assert said.count(note) == (words == ())


def _write_host_file(tmp_path: Path, model: str, args: str) -> Path:
    file = tmp_path / "host.toml"
    file.write_text(f'memory = "8GiB"\n[models.mine]\nmodel = "{model}"\nidle_s = 60\n{args}\n')
    return file


@pytest.mark.parametrize("args", ["args = []", 'args = ["--max-model-len", "1024"]'])
def test_the_hint_names_the_arguments_of_the_nearest_bundle_when_none_fits(
    model: str, hosted: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str
) -> None:
    publish_recorded(model, SHORT)
    assert main("host", "--host-file", str(_write_host_file(tmp_path, model, args))) == 3
    said = capsys.readouterr().err
    assert hosted == []
    assert "hint: use the arguments of that bundle: --max-model-len 512, or coldstart materialize " in said
    assert "coldstart serve" not in said


def test_a_reloaded_host_file_takes_the_arguments_of_the_newest_bundle(
    model: str, hosted: list[Any], sources: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models share the memory of the GPUs each time."""
    monkeypatch.setattr(profiles, "share_gpus", lambda file: replace(file, notes=("shared",)))
    publish_recorded(model, SHORT, created="2020-01-01T00:00:00Z")
    main("host", "--host-file", str(_write_host_file(tmp_path, model, "")))
    publish_recorded(model, LONG)
    (before,), (after,) = hosted[0].catalogue.launches.values(), sources[0]().catalogue.launches.values()
    assert (tuple(before.args), tuple(after.args)) == (SHORT, LONG)
    main("host", model, "--memory", "8GiB")
    assert [one.notes for one in (*hosted, sources[0]())] == [("shared",)] * 3
    assert before.server_identity != after.server_identity
