"""Fixtures of several packages. This file also puts `tools` on the import path of the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from coldstart.artifacts.store import Store

from coldstart.system import runtime
from coldstart.system.devices import nvml

# Tests use places of their own, not those of the user or of the demo.
for name in ("COLDSTART_CACHE_DIR", "XDG_STATE_HOME"):
    os.environ.pop(name, None)

# What is imported is needed to the end: to look through it while it grows takes a fifth of the collection.
gc.disable()

# A busy machine must not fail a test.
hypothesis.settings.register_profile("coldstart", deadline=None)
# `make check` selects this profile; `make test` runs all examples.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.load_profile("coldstart")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that this machine cannot run, with the reason."""
    lacking: dict[str, str] = {}
    if runtime.vllm_distribution() is None:
        lacking["vllm"] = "vLLM is not installed: coldstart install cpu"
    if not nvml.query():
        lacking["gpu"] = "no NVIDIA device answers"
    for item in items:
        for marker in lacking.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=lacking[marker]))


def pytest_collection_finish() -> None:
    """Exempt all that is imported from garbage collection, which would look through it again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """Make fsync a no-op: only a power failure shows the difference, and the quick tests call it 8,000 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty bundle store."""
    return Store(tmp_path / "store")
