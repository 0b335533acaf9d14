"""Fixtures of several packages. This file also puts `tools` on the import path of the tests."""

import asyncio
import gc
import inspect
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import uvloop
from coldstart.artifacts.store import Store

from coldstart.system import runtime
from coldstart.system.devices import nvml

# Tests use places of their own, not those of the user or of the demo.
for name in ("COLDSTART_CACHE_DIR", "XDG_STATE_HOME"):
    os.environ.pop(name, None)

# Sockets of tests are deep below the temporary directory, and the path of a socket can have 107 bytes.
if len(os.fsencode(tempfile.gettempdir())) > 20:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# What is imported is needed to the end: to look through it while it grows takes a fifth of the collection.
gc.disable()

# A busy machine must not fail a test.
hypothesis.settings.register_profile("coldstart", deadline=None)
# `make check` selects this profile; `make test` runs all examples.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.load_profile("coldstart")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `make test` runs each quick test once."""
    parser.addoption("--after-quick", default="", metavar="PATHS", help="leave out the quick tests of PATHS")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have run; skip tests that this machine cannot run, with the reason."""
    places = [config.rootpath / path for path in config.getoption("after_quick").split()]
    done = [item for item in items if any(map(item.path.is_relative_to, places)) and _is_quick(item)]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in set(done)]
        # The longest files first: those that start vLLM, then those of few slow tests.
        count = Counter(item.path for item in items)
        starting = {item.path for item in items if "vllm" in item.keywords}
        items.sort(key=lambda item: (item.path not in starting, count[item.path]))
    lacking: dict[str, str] = {}
    if runtime.find_vllm_distribution() is None:
        lacking["vllm"] = "vLLM is not installed: coldstart install cpu"
    if not nvml.list_gpus():
        lacking["gpu"] = "no NVIDIA device answers"
    for item in items:
        for marker in lacking.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=lacking[marker]))


def _is_quick(item: pytest.Item) -> bool:
    """Return what SWIFT in the Makefile selects."""
    slow = {"vllm", "gpu", "slow", "nightly"} & {mark.name for mark in item.iter_markers()}
    return not slow and Path(__file__).parent / "unit" / "vllm" not in item.path.parents


def pytest_collection_finish() -> None:
    """Exempt all that is imported from garbage collection, which would look through it again and again."""
    gc.freeze()
    gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on the event loop of the gateway."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """Make fsync a no-op: only a power failure shows the difference, and the quick tests call it 8,000 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set XDG_RUNTIME_DIR to a directory of this test alone, whose path is short enough for every socket."""
    with tempfile.TemporaryDirectory(prefix="cs-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty bundle store."""
    return Store(tmp_path / "store")
