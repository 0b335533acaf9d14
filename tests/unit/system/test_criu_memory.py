"""A frozen process whose memory was moved to a file runs with the same memory and shares unwritten pages."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes import wait_until
from tools.machine import find_criu, require_criu

from coldstart.launch import pruning
from coldstart.system import fingerprint
from coldstart.system.paths import Cache
from coldstart.system.snapshot import criu, criu_memory, runtime_image

SIZE = 8 << 20
# Whenever it is asked: says what its memory is and from where, then writes to one page of it.
HOLDER = """
import hashlib, json, os, sys, time
held, where = bytearray(os.urandom(int(sys.argv[1]))), sys.argv[2]
while True:
    if os.path.exists(where + "/ask"):
        with open("/proc/self/maps") as maps:
            mapped = [line for line in maps if line.rstrip().endswith(".img")]
        with open(where + "/part", "w") as said:
            json.dump({"digest": hashlib.sha256(held).hexdigest(), "mapped": mapped}, said)
        held[len(held) // 2] ^= 1
        os.unlink(where + "/ask")
        os.rename(where + "/part", where + "/said")
    time.sleep(0.01)
"""
OPTIONS = ("-v1", "-o", "log")
NOWHERE: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Yield a directory with images/ of a process with SIZE random bytes, and the digest of the bytes."""
    place = tmp_path_factory.mktemp("frozen")
    (place / "images").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        require_criu(patch)
        command = [sys.executable, "-c", HOLDER, str(SIZE), str(place)]
        holder = subprocess.Popen(command, start_new_session=True, cwd="/", **NOWHERE)
        try:
            ask(place)
            said = ask(place)  # the second answer needs no new pages
            done = criu.run_criu("dump", "-t", str(holder.pid), "-D", str(place / "images"), *OPTIONS)
        finally:
            holder.kill()
            holder.wait()
        assert done.returncode == 0, (place / "images" / "log").read_text()
        assert said["mapped"] == []
        with thawed(place):
            digest = ask(place)["digest"]
        yield place, digest


def ask(place: Path) -> dict[str, Any]:
    """Return the answer of the process in `place`."""
    (place / "said").unlink(missing_ok=True)
    (place / "ask").touch()
    wait_until((place / "said").exists)
    said: dict[str, Any] = json.loads((place / "said").read_text())
    return said


@contextmanager
def thawed(place: Path, images: str = "images") -> Iterator[None]:
    """Run the frozen process from `images` in separate namespaces."""
    restore = [find_criu() or "", "restore", "-D", str(place / images), "-W", str(place), *OPTIONS]
    guardian = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *restore], **NOWHERE
    )
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()


@pytest.fixture
def moved(frozen: tuple[Path, str]) -> Iterator[Path]:
    """Copy the images to images-moved/ and move their memory to a file."""
    place, _ = frozen
    images = place / "images-moved"
    shutil.copytree(place / "images", images)
    assert criu_memory.move_memory(images, images / criu_memory.MEMORY_FILE) >= SIZE
    yield images
    shutil.rmtree(images)


def test_process_thaws_with_the_same_memory_from_the_file(frozen: tuple[Path, str], moved: Path) -> None:
    place, digest = frozen
    before, after = ((images / "pages-1.img").stat().st_size for images in (place / "images", moved))
    assert after + (moved / criu_memory.MEMORY_FILE).stat().st_size == before and before - after >= SIZE
    with thawed(place, moved.name):
        said = ask(place)
    assert said["digest"] == digest
    assert all(line.rstrip().endswith(criu_memory.MEMORY_FILE) for line in said["mapped"])
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in said["mapped"]]
    assert max(end - start for start, end in spans) >= SIZE  # one mapping, although CRIU splits its pages


def test_writes_of_one_process_are_private(frozen: tuple[Path, str], moved: Path) -> None:
    place, digest = frozen
    kept = hashlib.sha256((moved / criu_memory.MEMORY_FILE).read_bytes()).digest()
    with thawed(place, moved.name):
        assert ask(place)["digest"] == digest != ask(place)["digest"]
    assert hashlib.sha256((moved / criu_memory.MEMORY_FILE).read_bytes()).digest() == kept
    with thawed(place, moved.name):
        assert ask(place)["digest"] == digest


ALL, NO_RESOURCE = (1 << 41) - 1, ((1 << 41) - 1) & ~(1 << 24)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "criu"
    program.touch(mode=0o700)
    monkeypatch.setenv(str(criu.VARIABLE), str(program))
    (tmp_path / "nr_open").write_text("1048576\n")
    monkeypatch.setattr(criu, "_NR_OPEN", tmp_path / "nr_open")


def _hold(monkeypatch: pytest.MonkeyPatch, held: int, hard: int) -> None:
    monkeypatch.setattr(criu, "_read_capabilities", lambda: held)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("report", "is_accepted"),
    [
        ("Version: 3.17", False),
        ("Version: 4.1.1", False),
        ("Version: 4.2", True),
        ("Version: 4.10\nGitID: v4.10", True),
        ("Version: 5.0", True),
        ("nothing", True),
    ],
)
def test_missing_names_the_version_when_criu_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: str, is_accepted: bool
) -> None:
    _hold(monkeypatch, ALL, 1048576)
    (tmp_path / "criu").write_text(f"#!/bin/sh\necho '{report}'\n")
    if is_accepted:
        assert criu.find_limit() is None
        return
    reason, hint = criu.find_limit() or ("", "")
    assert f"CRIU {report.removeprefix('Version: ')}: 4.2 or newer is required" in reason
    assert "build CRIU 4.2 or newer" in hint


Make = Callable[..., Path]


@pytest.fixture
def root(home: Path) -> Path:
    return Cache.at().runtimes


@pytest.fixture
def make(root: Path) -> Make:
    """Return make(name), which publishes a fake image that depends on this file."""

    def publish(name: str = "a" * 64, kernel: str | None = None) -> Path:
        image = root / name
        with runtime_image.publish_image(image) as partial:
            (partial / "pages-1.img").write_bytes(b"x" * 999)
            machine = fingerprint.read_machine_properties() | ({"kernel": kernel} if kernel else {})
            recorded = fingerprint.Fingerprint(machine, fingerprint.read_states([__file__]))
            (partial / fingerprint.ABOUT).write_bytes(msgspec.json.encode(recorded))
            said = {"python": sys.executable, "vllm": "0.32.0", "made": "2026-01-01T00:00:00Z"}
            (partial / runtime_image.ABOUT).write_text(json.dumps(said))
        return image

    return publish


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda image: (image / "pages-1.img").write_bytes(b"x" * 99), "pages-1.img has changed since it was created"),
        (lambda image: os.truncate(image / "pages-1.img", 500), "pages-1.img has changed since it was created"),
        (lambda image: (image / "pages-1.img").unlink(), "pages-1.img was removed"),
        (lambda image: image.chmod(0o755), "mode 0755, expected"),
        (lambda image: (image / "pages-1.img").chmod(0o644), "pages-1.img has changed since it was created"),
    ],
)  # fmt: skip
def test_changed_image_is_refused(make: Make, spoil: Callable[[Path], object], reason: str) -> None:
    image = make()
    spoil(image)
    assert reason in str(runtime_image.explain_unreadable(image))


def test_prune_removes_unusable_images_and_leftovers(make: Make, root: Path) -> None:
    kept, old = make("a" * 64), make("b" * 64, kernel="3.1")
    left = root / ".partial-x"
    left.mkdir()
    (left / "pages-1.img").write_bytes(b"half" * 4096)
    planned = pruning.prune(Cache.at(), dry_run=True)
    assert {*planned.frozen} == {old, left} and old.is_dir() and left.is_dir()
    assert pruning.prune(Cache.at()) == planned and planned.freed_bytes > 4096
    assert kept.is_dir() and not old.exists() and not left.exists()
    assert [one.directory for one in runtime_image.list_images(root)] == [kept]
