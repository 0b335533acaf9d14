"""Environment of the end-to-end tests of one worker: one bundle, one reference, one engine template.

COLDSTART_E2E_ROOT retains the environment between runs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tools.machine import PROMPTS, READY_S, VLLM, Machine, Tokens

from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST, RunFiles, launch
from coldstart.validate.launchers import Subject, VllmLauncher


@dataclass(frozen=True)
class BundleReference:
    """The materialized bundle of tiny-llama."""

    ref: str
    key: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the time limit, because a busy machine needs longer for a few starts than the limit of the suite."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * READY_S))


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """The machine of all tests. Its path is short, because the length of Unix socket paths is limited."""
    kept = os.environ.get("COLDSTART_E2E_ROOT")
    root = Path(kept or tempfile.mkdtemp(prefix="cs-"))
    yield Machine(root / os.environ.get("PYTEST_XDIST_WORKER", "here"))
    if not kept:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def bundle(machine: Machine) -> BundleReference:
    """Materialize tiny-llama once."""
    result = json.loads(machine.run("materialize", "tiny-llama", "--format", "json", "--", *VLLM))
    return BundleReference(result["ref"], result["key"])


@pytest.fixture(scope="session")
def reference(machine: Machine, bundle: BundleReference, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Return the tokens of a stock vLLM server with empty caches."""
    known = machine.root / "reference.json"
    if not known.exists():
        (model,) = (machine.cache / "models").glob("*/tiny-llama")
        known.write_text(json.dumps(_stock_tokens(model, tmp_path_factory.mktemp("reference"))))
    return [tuple(tokens) for tokens in json.loads(known.read_text())]


@pytest.fixture(scope="module")
def engine_template(machine: Machine, bundle: BundleReference) -> Iterator[None]:
    """Start an engine template of tiny-llama."""
    machine.run("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)
    yield
    machine.run("template", "stop", "--level", "engine")


def _stock_tokens(model: Path, directory: Path) -> Tokens:
    files = RunFiles.make(directory / "run")
    server = launch(VllmLauncher(Subject("tiny-llama", str(model), VLLM), directory, warm=False), files)
    try:
        client = CompletionClient(HOST, files.port)
        client.first_token(PROMPTS[0], deadline_s=time.monotonic() + READY_S, check=server.check)
        return [client.complete(prompt, 16).tokens for prompt in PROMPTS]
    finally:
        server.stop()
