"""Names of Inductor's kernels do not depend on the place of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coldstart.vllm.engine import compiled

torch = pytest.importorskip("torch")
COMPILE = """
import torch
from coldstart.vllm.engine import compiled
compiled.use_portable_kernel_names()
print(torch.__file__, torch.compile(lambda x: x.sin() + 1)(torch.arange(64.0)).sum().item())
"""
COMMAND = "g++ -O3 -I{0}/python3.11 -I{0}/torch/include -ltorch -L{0}/torch/lib "


@pytest.fixture
def codecache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "write", codecache.write)
    return codecache


def _compile(cache: Path, **more: str) -> tuple[str, str]:
    """Compile a kernel in a process of its own, and return the path of its torch and the result."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE],
        env=environment | more,
        capture_output=True,
        text=True,
        check=True,
    )
    place, result = done.stdout.split()
    return place, result


def test_kernels_are_found_when_torch_has_another_path(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch").symlink_to(Path(torch.__file__).parent)
    place, result = _compile(tmp_path / "cache")
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.main.so")}
    assert built
    other_place, other_result = _compile(tmp_path / "cache", PYTHONPATH=str(tmp_path / "packages"))
    assert other_place != place and other_result == result
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.main.so")} == built


def test_name_differs_when_source_or_flags_differ(codecache: Any) -> None:
    compiled.use_portable_kernel_names()
    compiled.use_portable_kernel_names()
    names = [
        codecache.write(source, "main.cpp", extra=f"{optimized} {COMMAND.format(place)}{flags}")[0]
        for source, optimized, place, flags in (
            ("a", None, "/one", ""),
            ("a", None, "/two", ""),
            ("b", None, "/one", ""),
            ("a", None, "/one", "-mavx2"),
            ("a", "x -INFINITY", "/one", ""),
            ("a", "x -INT_MAX", "/one", ""),
        )
    ]
    assert names[0] == names[1]
    assert len({*names}) == 5
