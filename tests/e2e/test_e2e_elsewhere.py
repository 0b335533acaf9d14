"""A bundle moved to another home, store, working directory and place of torch.

Its code runs only if trusted, then with every fast path.

Starts on one machine: the signer is trusted, and a blob is damaged. attacks/test_untrusted_code.py has unknown signers.
"""

import json
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.blobs import blob_path
from tools import tiny_models
from tools.bundles import flip
from tools.machine import VLLM, Machine, Tokens

pytestmark = pytest.mark.vllm
SPANS = {
    "coldstart",
    "import torch",
    "import vllm",
    "load weights",
    "restore compiled forward",
    "start engine",
    "first token",
}
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang")


@dataclass(frozen=True)
class Elsewhere:
    """The other machine; its compilers log each call to `calls`."""

    machine: Machine
    calls: Path

    def compiled(self) -> list[str]:
        """Return the calls that compile, without version queries."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [call for call in calls if " -o " in call or " -c " in call]

    def unpacked(self) -> dict[str, int]:
        """Return every file of the unpacked code with its size, without inductor's empty locks and marks."""
        root = self.machine.cache / "unpacked"
        files = [p for p in root.glob("*/**/*") if p.is_file() and p.suffix not in (".lock", ".load_ok")]
        return {str(Path(*path.relative_to(root).parts[1:])): path.stat().st_size for path in files}


@pytest.fixture(scope="module")
def elsewhere(machine: Machine, bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    scratch = tmp_path_factory.mktemp("elsewhere")
    machine.run("export", bundle.ref, "--to", str(scratch / "bundle.tar"))
    calls = scratch / "calls"
    path = f"{_watched_compilers(scratch / 'bin', calls)}:{os.environ['PATH']}"
    root = machine.root.parent / "elsewhere"
    shutil.rmtree(root, ignore_errors=True)
    # torch is installed at another path there.
    (scratch / "packages").mkdir()
    (scratch / "packages" / "torch").symlink_to(Path(find_spec("torch").origin).parent)
    # vLLM loads no plugins here: a start must not depend on ours.
    more = {"PYTHONPATH": str(scratch / "packages"), "VLLM_PLUGINS": ""}
    other = Machine(root, {"PATH": path, **more})
    tiny_models.place("tiny-llama", other.cache / "models")
    other.run("import", str(scratch / "bundle.tar"))
    return Elsewhere(other, calls)


@pytest.fixture
def trusted(machine: Machine, elsewhere: Elsewhere, tmp_path: Path) -> Elsewhere:
    """The other machine after its user has trusted the key of the first one."""
    (tmp_path / "key.pem").write_text(machine.run("trust", "show"))
    elsewhere.machine.run("trust", "add", str(tmp_path / "key.pem"))
    return elsewhere


def test_bundle_of_an_unknown_signer_needs_an_option(elsewhere: Elsewhere) -> None:
    elsewhere.machine.run("serve", "tiny-llama", "--dry-run", "--", *VLLM, code=3)
    assert elsewhere.unpacked() == {}


def test_moved_bundle_uses_every_fast_path_when_trusted(
    machine: Machine, bundle: Any, trusted: Elsewhere, reference: Tokens, tmp_path: Path
) -> None:
    trusted.calls.unlink(missing_ok=True)
    trace = tmp_path / "trace.json"
    with trusted.machine.serving("tiny-llama", "--mode", "fresh", "--timeline", str(trace)) as served:
        assert served.report["mode"] == "fresh" and served.report["url"] in served.output.read_text()
        assert served.report["fast_path"] == {"mode": True, "compile": True}
        assert served.report["fallbacks"] == [] and served.report["canary"] is True
        assert served.tokens() == reference
    assert trusted.compiled() == []
    assert trusted.unpacked() == _members(machine, bundle)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} >= SPANS
    assert len({event["pid"] for event in events}) == 3  # the command, the server, its engine
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)


@pytest.mark.parametrize("damaged", ["modelinfo", pytest.param("compile", marks=pytest.mark.nightly)])
def test_damaged_section_is_reported_by_a_server(trusted: Elsewhere, reference: Tokens, damaged: str) -> None:
    there = trusted.machine
    shown = json.loads(there.run("inspect", "tiny-llama", "--format", "json"))
    digest = next(section["digest"] for section in shown["sections"] if section["type"] == damaged)
    shutil.rmtree(there.cache / "unpacked", ignore_errors=True)
    blob = blob_path(there.cache / "bundles", digest)
    flip(blob, blob.stat().st_size // 2)
    there.run("validate", shown["name"], code=1)
    with there.serving("tiny-llama") as served:
        (fallback,) = served.report["fallbacks"]
        assert fallback["section"] == damaged and "CS-DIGEST" in fallback["reason"]
        assert served.tokens() == reference
    # A start without the bundle's code compiles.
    assert bool(trusted.compiled()) is (damaged == "compile")


def _watched_compilers(directory: Path, calls: Path) -> Path:
    directory.mkdir()
    for name in COMPILERS:
        if real := shutil.which(name):
            script = directory / name
            # Name and PATH as without the log: inductor's keys contain the version output of gcc.
            watch = f'echo "{name} $*" >> "{calls}"\nPATH="${{PATH#*:}}"\nexec -a "{name}" "{real}" "$@"\n'
            script.write_text(f"#!/bin/bash\n{watch}")
            script.chmod(0o755)
    return directory


def _members(machine: Machine, bundle: Any) -> dict[str, int]:
    tree = json.loads(machine.run("inspect", bundle.ref, "--tree", "--format", "json"))
    return {member["path"]: member["size"] for member in tree["sections"]["compile"]}
