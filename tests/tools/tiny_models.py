"""Tiny models that all tests of this checkout share, because building one takes seconds."""

import shutil
import zlib
from importlib.metadata import version
from pathlib import Path

from coldstart.models import tiny

_SHARED = Path(__file__).parents[2] / ".cache" / "tests"


def place(name: str, models: Path) -> Path:
    """Copy the shared model `name` to where `tiny.build_tiny_model` looks for it below `models`, and return the copy."""
    target = location(name, models)
    if not target.is_dir():
        shutil.copytree(shared(name), target)
    return target


def location(name: str, models: Path) -> Path:
    """Return where `tiny.build_tiny_model` looks for the model `name` below `models`."""
    return models / f"tiny-v{tiny.GENERATION}" / name


def shared(name: str) -> Path:
    """Return the shared model `name`, built on first use. Other code, or another transformers, builds another one."""
    made_by = Path(tiny.__file__).read_bytes() + version("transformers").encode()
    return tiny.build_tiny_model(name, _SHARED / f"{zlib.crc32(made_by):08x}")
