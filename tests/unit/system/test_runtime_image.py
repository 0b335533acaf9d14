"""An image is read only on its machine and unchanged; a failed image leaves no files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coldstart.launch import pruning
from coldstart.system import fingerprint
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image

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
    left = root / ".partial"
    left.mkdir()
    (left / "pages-1.img").write_bytes(b"half" * 4096)
    planned = pruning.prune(Cache.at(), dry_run=True)
    assert {*planned.frozen} == {old, left} and old.is_dir() and left.is_dir()
    assert pruning.prune(Cache.at()) == planned and planned.freed_bytes > 4096
    assert kept.is_dir() and not old.exists() and not left.exists()
    assert [one.directory for one in runtime_image.list_images(root)] == [kept]
