"""Processes that coldstart starts do not import modules from the working directory."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

import coldstart
from coldstart.models import tiny

PACKAGE = Path(coldstart.__file__).parent


@pytest.mark.vllm
def test_a_module_in_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    here = tmp_path / "here"
    here.mkdir()
    for name in ("torch", "coldstart", "tokenizers"):
        (here / f"{name}.py").write_text(f"open({os.fspath(marker)!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", os.fspath(here))])
    assert (tiny.build("tiny-opt", tmp_path / "models") / "config.json").exists()
    assert not marker.exists()


def test_child_processes_do_not_import_from_the_working_directory() -> None:
    starting = [file for file in PACKAGE.rglob("*.py") if '"-m"' in file.read_text()]
    assert len(starting) > 5
    for file in starting:
        for node in ast.walk(ast.parse(file.read_text())):
            words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List) else []
            if "'-m'" in words and any(word.strip("f").startswith("'coldstart.") for word in words):
                assert "'-P'" in words or _elsewhere(file), f"{file}:{node.lineno}"


def _elsewhere(file: Path) -> bool:
    """Return whether the process gets another working directory or is the command line itself"""
    return 'cwd="/"' in file.read_text() or file.name == "launchers.py"
