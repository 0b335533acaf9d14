"""A tiny model is built once and completely, with the same bytes everywhere, also by concurrent processes."""

import threading
from pathlib import Path

import pytest
from tools import tiny_models

from coldstart.errors import ColdstartError
from coldstart.models import tiny


def test_several_at_once_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def child(name: str, draft: Path) -> None:
        calls.append(name)
        (draft / "config.json").write_text("{}")

    monkeypatch.setattr(tiny, "_run_child", child)
    threads = [threading.Thread(target=tiny.build, args=("tiny-opt", tmp_path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["tiny-opt"]
    assert (tiny.build("tiny-opt", tmp_path) / "config.json").is_file()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ColdstartError, match="cannot build tiny-llama"):
        tiny.build("tiny-llama", tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if not path.name.endswith(".lock")] == ["tiny-v1"]


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = tiny_models.shared("tiny-llama"), tiny.build("tiny-llama", tmp_path)
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {
        f.name: f.read_bytes() for f in second.iterdir()
    }
    held = {file.name for file in first.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= held
    assert "tokenizer_config.json" in held
