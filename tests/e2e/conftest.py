"""Environment of the end-to-end tests of one worker: one bundle, one reference, one engine template.

COLDSTART_E2E_ROOT retains the environment between runs.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from coldstart.artifacts import files
from support import kernel_compiler, plain_vllm
from tools import tiny_models
from tools.machine import EAGER, PROMPTS, READY_S, VLLM, Machine, Tokens

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
MODELS = ("tiny-llama", "tiny-opt", "tiny-qwen2")
# The second and third need no bundle, and run while the first worker materializes the one of both.
# A worker takes the next file before its last two tests: short files are at the end, and those of one template together.
LONGEST = "elsewhere fleet fleet_fetch models consolidation kv_handover many fleet_vllm templates snapshot endings scheduler up"


@dataclass(frozen=True)
class BundleReference:
    """The materialized bundle of tiny-llama."""

    ref: str
    key: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the time limit, because a busy machine needs longer for a few starts; run the longest files first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * READY_S))
    names = [f"test_e2e_{name}.py" for name in LONGEST.split()]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of all workers of this run; without workers, of this process."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if WORKER else base


@pytest.fixture(scope="session", autouse=True)
def compiler(shared: Path) -> None:
    """Compile equal kernels of this run once."""
    kernel_compiler.install(shared / "compiler")


@pytest.fixture(scope="session")
def machine(shared: Path) -> Iterator[Machine]:
    """The machine of all tests. Its path is short, because the length of Unix socket paths is limited."""
    kept = os.environ.get("COLDSTART_E2E_ROOT")
    root = Path(kept or tempfile.mkdtemp(prefix="cs-"))
    made = Machine(root / (WORKER or "here"))
    is_new = not made.root.exists()
    for name in MODELS:  # to build one takes 10 CPU seconds
        tiny_models.place(name, made.cache / "models")
    if WORKER and is_new:
        _furnish(made, shared / "home")
    yield made
    made.run("template", "stop", "--force")
    if not kept:
        shutil.rmtree(root, ignore_errors=True)


def _furnish(machine: Machine, home: Path) -> None:
    """Give a new machine the home of the worker that materialized tiny-llama first; the others wait for it."""
    with files.hold_lock(home.with_name("home.lock")):
        if home.exists():
            shutil.copytree(home, machine.root / "home", symlinks=True, dirs_exist_ok=True)
            return
        machine.run("materialize", "tiny-llama", "-q", "--", *VLLM)
        shutil.copytree(machine.root / "home", home, symlinks=True)


@pytest.fixture(scope="session")
def bundle(machine: Machine) -> BundleReference:
    """Materialize tiny-llama once."""
    result = json.loads(machine.run("materialize", "tiny-llama", "--format", "json", "--", *VLLM))
    return BundleReference(result["ref"], result["key"])


@pytest.fixture(scope="session")
def reference(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Return the tokens of stock vLLM that compiles nothing, asked once by all workers."""
    known = shared / "reference.json"
    with files.hold_lock(shared / "reference.lock"):
        if not known.exists():
            directory = tmp_path_factory.mktemp("reference")
            given = {"args": ["--model", str(tiny_models.shared("tiny-llama")), *EAGER], "prompts": PROMPTS}
            answers = plain_vllm.ask(given | {"tokens": 16}, tiny_models.VLLM_CACHES, directory / "log")
            known.write_text(json.dumps(answers))
    return [tuple(tokens) for tokens in json.loads(known.read_text())]


@pytest.fixture
def engine_template(machine: Machine, bundle: BundleReference) -> None:
    """Start an engine template of tiny-llama, unless that of another test still runs."""
    templates = json.loads(machine.run("template", "status", "--format", "json"))["templates"]
    if not any(one["level"] == "engine" and one["ready"] for one in templates):
        machine.run("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)


@pytest.fixture
def no_template(machine: Machine) -> None:
    """Stop the templates of other tests."""
    machine.run("template", "stop", "--force")
