"""A snapshot or a template is refused if one byte of the files that it was created from has changed."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import template_pool
from coldstart.system import digests, fingerprint

PLAN = LaunchPlan(["serves"], key="sha256:" + "a" * 64)


@pytest.fixture
def parts(home: Path, tmp_path: Path) -> list[Path]:
    """Copy 50 files that this process has mapped or imported."""
    chosen = random.Random(7).sample(
        sorted({*fingerprint.imported(), *fingerprint.mapped_files(os.getpid())}), 200
    )
    small = [Path(file) for file in chosen if 0 < Path(file).stat().st_size < 5_000_000][:50]
    made = [tmp_path / f"{number:02}-{file.name}" for number, file in enumerate(small)]
    for file, copy in zip(small, made, strict=True):
        shutil.copyfile(file, copy)
    assert len(made) == 50
    return made


def advance_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all files a minute old: digests of files newer than the clock's resolution are not recorded."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)


def test_difference_finds_one_changed_byte_in_each_of_fifty_files(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance_clock(monkeypatch)
    listed = digests.listing(map(str, parts))
    for file in parts:
        assert digests.difference(listed) is None
        data, before = file.read_bytes(), file.stat()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        file.write_bytes(changed)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and mtime say nothing
        assert str(digests.difference(listed)).startswith(f"{file} (sha256 ")
        file.write_bytes(data)


def test_difference_does_not_read_unchanged_files_again(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance_clock(monkeypatch)
    listed = digests.listing(map(str, parts))
    assert digests.difference(listed) is None
    monkeypatch.setattr(digests, "_sha256", lambda path: pytest.fail(f"{path} is read"))
    assert digests.difference(listed) is None


@pytest.fixture
def warm(home: Path, fake_engine: Callable[[str], None]) -> template_pool.Warm:
    fake_engine("serves")
    return template_pool.start("engine", PLAN, "tiny", 20)


def test_a_template_of_an_older_commit_is_refused(warm: template_pool.Warm) -> None:
    """The template's record has another digest of our code: its memory differs from the files."""
    try:
        assert template_pool.obstacle(warm, PLAN) is None
        record = warm.directory / fingerprint.LIST
        ours = next(
            line
            for line in record.read_text().splitlines()
            if line.endswith("coldstart/launch/template_pool.py")
        )
        record.write_text(record.read_text().replace(ours, "0" * 64 + ours[64:]))
        assert "template_pool.py (sha256 000000000000), found " in str(template_pool.obstacle(warm, PLAN))
    finally:
        template_pool.stop(warm)


def test_a_template_of_another_environment_is_refused(
    warm: template_pool.Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        assert str(template_pool.obstacle(warm, PLAN)).startswith(
            "TORCHINDUCTOR_MAX_AUTOTUNE: the template was created with none"
        )
    finally:
        template_pool.stop(warm)
