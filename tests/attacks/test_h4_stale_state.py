"""H4: stale snapshots and templates served old code. One changed byte of what they were made of, and they are refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
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
    """Copies of 50 files that this very process has mapped or imported."""
    chosen = random.Random(7).sample(
        sorted({*fingerprint.imported(), *fingerprint.mapped_files(os.getpid())}), 200
    )
    small = [Path(file) for file in chosen if 0 < Path(file).stat().st_size < 5_000_000][:50]
    made = [tmp_path / f"{number:02}-{file.name}" for number, file in enumerate(small)]
    for file, copy in zip(small, made, strict=True):
        shutil.copyfile(file, copy)
    assert len(made) == 50
    return made


def aged(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had lain there for a while: what is younger than the clock's grain is never recorded."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)


def test_one_byte_in_each_of_fifty_files(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    aged(parts, monkeypatch)
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


def test_a_file_that_is_as_it_was_is_not_refused_for_its_times(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(parts, monkeypatch)
    listed = digests.listing(map(str, parts))
    assert digests.difference(listed) is None
    parts[0].touch()
    assert digests.difference(listed) is None


def test_what_is_unchanged_is_not_read_again(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    aged(parts, monkeypatch)
    listed = digests.listing(map(str, parts))
    assert digests.difference(listed) is None
    monkeypatch.setattr(digests, "_sha256", lambda path: pytest.fail(f"{path} is read"))
    assert digests.difference(listed) is None


@pytest.mark.parametrize("step_s", [-3600.0, 0.0])
def test_what_is_too_young_or_of_the_future_is_read_every_time(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """The clock may step back: a change within its grain must not hide behind an equal ctime."""
    real, read = time.time, list[str]()
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    inner = digests._sha256
    monkeypatch.setattr(digests, "_sha256", lambda path: (read.append(path), inner(path))[1])
    for _ in range(2):
        assert digests.difference(digests.listing(map(str, parts[:2]))) is None
    assert len(read) == 8


def test_the_list_is_one_that_sha256sum_checks(parts: list[Path]) -> None:
    import subprocess

    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("there is no sha256sum here")
    said = subprocess.run(
        [program, "--check", "--strict", "--quiet"],
        input=digests.listing(map(str, parts)),
        text=True,
        check=False,
    )
    assert said.returncode == 0


@pytest.fixture
def warm(home: Path, fake_engine: Callable[[str], None]) -> template_pool.Warm:
    fake_engine("serves")
    return template_pool.start("engine", PLAN, "tiny", 20)


def test_a_template_of_an_older_commit_is_refused(warm: template_pool.Warm) -> None:
    """Its record says another digest of our own code: what it has in memory is not what lies here."""
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


def test_a_template_that_does_not_say_what_it_was_made_of_is_refused(warm: template_pool.Warm) -> None:
    try:
        (warm.directory / fingerprint.ABOUT).unlink()
        assert "made by an older coldstart" in str(template_pool.obstacle(warm, PLAN))
        (warm.directory / fingerprint.ABOUT).write_text(json.dumps({"format": 1}))
        assert "made by an older coldstart" in str(template_pool.obstacle(warm, PLAN))
    finally:
        template_pool.stop(warm)


def test_a_template_of_another_environment_is_refused(
    warm: template_pool.Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        assert str(template_pool.obstacle(warm, PLAN)).startswith(
            "TORCHINDUCTOR_MAX_AUTOTUNE: the template was made with none"
        )
    finally:
        template_pool.stop(warm)


def test_another_kernel_or_library_or_processor(warm: template_pool.Warm) -> None:
    try:
        record = warm.directory / fingerprint.ABOUT
        about = json.loads(record.read_text())
        assert all(about["machine"].values())
        for name in about["machine"]:
            other = about | {"machine": about["machine"] | {name: "another"}}
            record.write_text(json.dumps(other))
            assert f"was taken on {name} another, this is" in str(template_pool.obstacle(warm, PLAN))
    finally:
        template_pool.stop(warm)


def test_all_of_our_own_code_is_in_the_list(warm: template_pool.Warm) -> None:
    """Also what is imported only after the fork: it would be of another release than what is in memory."""
    try:
        listed = (warm.directory / fingerprint.LIST).read_text()
        root = Path(sys.modules["coldstart"].__path__[0])
        missing = [path for path in root.rglob("*.py") if str(path) not in listed]
        assert missing == [] and "/artifacts/bundle.py" in listed and sys.modules["json"].__file__ in listed
    finally:
        template_pool.stop(warm)
