"""One environment for the end-to-end tests of a worker: one bundle, one reference, one engine template.

Set COLDSTART_E2E_ROOT to keep the environment between runs.
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
class Made:
    """The materialized bundle of tiny-llama."""

    ref: str
    key: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite's own limit, made for tests that start no engine, is below what a busy machine takes for a few starts."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * READY_S))


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """The machine that everything is made on. Its path is short: unix sockets lie below it."""
    kept = os.environ.get("COLDSTART_E2E_ROOT")
    root = Path(kept or tempfile.mkdtemp(prefix="cs-"))
    yield Machine(root / os.environ.get("PYTEST_XDIST_WORKER", "here"))
    if not kept:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def made(machine: Machine) -> Made:
    """tiny-llama, materialized once."""
    said = json.loads(machine.run("materialize", "tiny-llama", "--format", "json", "--", *VLLM))
    return Made(said["ref"], said["key"])


@pytest.fixture(scope="session")
def reference(machine: Machine, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """The tokens of an ordinary vLLM server with empty caches: the only one that is started here."""
    known = machine.root / "reference.json"
    if not known.exists():
        (model,) = (machine.cache / "models").glob("*/tiny-llama")
        known.write_text(json.dumps(_ordinary(model, tmp_path_factory.mktemp("reference"))))
    return [tuple(tokens) for tokens in json.loads(known.read_text())]


@pytest.fixture(scope="module")
def engine_template(machine: Machine, made: Made) -> Iterator[None]:
    """A template with the engine of tiny-llama built."""
    machine.run("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)
    yield
    machine.run("template", "stop", "--level", "engine")


def _ordinary(model: Path, directory: Path) -> Tokens:
    files = RunFiles.make(directory / "run")
    server = launch(VllmLauncher(Subject("tiny-llama", str(model), VLLM), directory, warm=False), files)
    try:
        client = CompletionClient(HOST, files.port)
        client.first_token(PROMPTS[0], deadline_s=time.monotonic() + READY_S, check=server.check)
        return [client.complete(prompt, 16).tokens for prompt in PROMPTS]
    finally:
        server.stop()
