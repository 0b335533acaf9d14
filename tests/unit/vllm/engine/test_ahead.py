"""The kernel overrides are registered once, before the fork, and only if vLLM has this step on a CPU engine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from coldstart.vllm import compat
from coldstart.vllm.engine import ahead


class Platform:
    def __init__(self) -> None:
        self.calls, self.cpu = 0, True

    def is_cpu(self) -> bool:
        return self.cpu

    def register_triton_kernel_overrides(self) -> None:
        self.calls += 1


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Replace the platform of vLLM by a fake."""
    made = Platform()
    layers = "model_executor.layers.quantization.online.base"
    parts = [layers.rsplit(".", up)[0] for up in range(5)]
    for name in ("", "platforms", "compilation", "compilation.backends", *parts):
        module = ModuleType(f"vllm.{name}".rstrip("."))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", made, raising=False)
    monkeypatch.setattr(compat, "check", lambda feature, load: load())
    return made


def test_worker_finds_the_overrides_registered(platform: Platform) -> None:
    ahead.prepare()
    assert platform.calls == 1
    platform.register_triton_kernel_overrides()  # the call of each worker
    assert platform.calls == 1


def test_overrides_are_not_registered_on_a_gpu(platform: Platform) -> None:
    platform.cpu = False
    ahead.prepare()
    assert platform.calls == 0
    platform.register_triton_kernel_overrides()
    assert platform.calls == 1
