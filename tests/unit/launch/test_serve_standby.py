"""`serve --mode standby`: a sleeping engine is woken; the mode is refused if vLLM cannot sleep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import UsageError
from coldstart.launch import preparation
from coldstart.system import runtime

SLEEPY = LaunchPlan(Arguments(["m", "--enable-sleep-mode"]), key="sha256:" + "a" * 64)


def test_engine_without_sleep_mode_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    with pytest.raises(UsageError, match="cannot sleep without --enable-sleep-mode") as caught:
        preparation.start_template("asleep-1", replace(SLEEPY, vllm_args=Arguments(["m"])), "m", 1.0)
    assert "--level asleep-1 -- --enable-sleep-mode" in str(caught.value.hint)
