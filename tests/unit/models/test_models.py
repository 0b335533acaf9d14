"""Names resolve to models, and every failure has an exit code and a hint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from coldstart.errors import UsageError
from coldstart.models import resolution

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "my model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return place


@pytest.fixture(autouse=True)
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(siblings=[SimpleNamespace(rfilename="config.json")], sha=COMMIT)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: answer)


def test_alias_and_repository_are_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "snapshots" / COMMIT / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    asked: list[str] = []

    def download(repo_id: str, *_: Any, **__: Any) -> str:
        asked.append(repo_id)
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolution.resolve("OPT-125m") == resolution.resolve("facebook/opt-125m")
    assert asked == ["facebook/opt-125m"] * 2


def test_a_revision_of_a_directory_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        resolution.resolve(str(directory), revision="main")
