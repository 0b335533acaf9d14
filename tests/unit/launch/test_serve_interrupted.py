"""Shared objects that a killed linker left: real ones, truncated at different lengths."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import caches, ladder
from coldstart.launch.modes import FreshMode
from coldstart.launch.planning import ServeRequest

GCC = shutil.which("gcc")
pytestmark = pytest.mark.skipif(GCC is None, reason="no gcc")


@pytest.fixture
def shared_object(tmp_path: Path) -> Path:
    made = tmp_path / "cache" / "inductor" / "ab" / "kernel.so"
    made.parent.mkdir(parents=True)
    source = tmp_path / "kernel.c"
    source.write_text("double table[64] = {1, 2, 3}; double kernel(double x) { return x * table[2]; }")
    subprocess.run([str(GCC), "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def _loads(path: Path) -> bool:
    done = subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"], check=False)
    return done.returncode == 0


def test_every_unloadable_file_is_found(shared_object: Path, tmp_path: Path) -> None:
    content = shared_object.read_bytes()
    cut = tmp_path / "cut.so"
    for length in range(0, len(content), len(content) // 9):
        cut.write_bytes(content[:length])
        assert _loads(cut) or list(caches.find_truncated_libraries(tmp_path)) == [cut]


def test_file_in_use_by_a_linker_is_retained(shared_object: Path, tmp_path: Path) -> None:
    with shared_object.open("wb"):
        writer = subprocess.Popen(["sleep", "60"], stdout=shared_object.open("ab"))
    try:
        assert caches.remove_truncated_libraries(tmp_path / "cache") == []
    finally:
        writer.kill()
        writer.wait()
    assert len(caches.remove_truncated_libraries(tmp_path / "cache")) == 1


def test_start_removes_truncated_files_first(
    shared_object: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception): ...

    def fail(*_: object) -> None:
        raise Begun

    shared_object.write_bytes(b"")
    monkeypatch.setattr(FreshMode, "launch", fail)
    plan = LaunchPlan(Arguments([]), env={"VLLM_CACHE_ROOT": str(tmp_path / "cache")})
    request = ServeRequest(type("Found", (), {"model": type("Model", (), {"config": {}})})(), mode="fresh")  # type: ignore[arg-type]
    with pytest.raises(Begun):
        ladder.start(request, plan)
    assert not shared_object.exists()
