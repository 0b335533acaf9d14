"""Fake templates and servers: real processes, in which only vLLM is made up."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import CODE, TOKENIZER, key, provenance, write_tree

from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths

FAKE = Path(__file__).with_name("fake_engine.py")
Publish = Callable[..., Bundle]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of one user, below a short path: unix sockets lie there."""
    root = Path(tempfile.mkdtemp(prefix="cs-"))
    for name in ("COLDSTART_CACHE_DIR", "COLDSTART_CRIU", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(root))
    for name in ("CACHE_HOME", "STATE_HOME", "RUNTIME_DIR"):
        monkeypatch.setenv(f"XDG_{name}", str(root / name.lower()))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected ends."""
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """fake_engine(behaviour): from now on new engine processes are fake_engine.py, which behaves so."""

    real = sys.executable

    def choose(behaviour: str) -> None:
        script = tmp_path / "python"
        # In the script and not in the environment, of which a template is given little.
        fake = f'FAKE_BEHAVIOUR={behaviour} exec "{real}" "{FAKE}"'
        script.write_text(f'#!/bin/sh\n{fake} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return choose


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    """A model directory with one weight file that is no safetensors."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "pytorch_model.bin").write_bytes(b"weights" * 999)
    return ResolvedModel("tiny", directory, None, None, {})


@pytest.fixture
def publish(home: Path, store: Store, tmp_path: Path) -> Publish:
    """publish(**sections): a bundle with a tokenizer, code and JSON sections, signed by this user's key."""

    def make(signer: sign.HostKey | None = None, **sections: object) -> Bundle:
        scratch = tmp_path / "scratch"
        with store.begin(key()) as draft:
            draft.add_tree("tokenizer", write_tree(scratch / "tokenizer", TOKENIZER))
            draft.add_tree("compile", write_tree(scratch / "compile", CODE))
            for name, value in sections.items():
                draft.add_json(name, value)
            return draft.publish(provenance(), signer=signer or sign.host_key(paths.state_dir()))

    return make
