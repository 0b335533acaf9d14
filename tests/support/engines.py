"""Fake templates and servers: real processes with a fake vLLM."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import CODE, publish_sections, write_tree

from coldstart.launch import up_records
from coldstart.launch.up_records import UpRecord
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths
from coldstart.system.proc import processes
from coldstart.vllm import compat

FAKE = Path(__file__).with_name("fake_engine.py")
REASON = "it lacks an integration point"
FakeEngine, Publish = Callable[[str], None], Callable[..., Bundle]


class FakeThawed:
    """Fake of server_process.RestoredTemplate: a running template that ends with its server."""

    def __init__(self, socket: Path, process: subprocess.Popen[bytes]) -> None:
        self.socket, self.process, self.pid, self.ends = socket, process, process.pid, 0

    def end(self) -> None:
        self.ends += 1
        self.process.kill()
        self.process.wait()


@contextmanager
def hold_model(lookup: BundleLookup) -> Iterator[tuple[subprocess.Popen[bytes], UpRecord]]:
    """Yield a process that holds the lock of the model and ends at SIGTERM, and the record of it as a supervisor."""
    lock = up_records.find_directory(lookup).claim(lambda: None)
    assert isinstance(lock, int)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command, pass_fds=(lock,)) as process:
        os.close(lock)
        birth = processes.read_identity(process.pid)
        yield process, replace(up_records.create_own_record(lookup), pid=process.pid, birth=birth)
        process.kill()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of one user below a short path, because the length of Unix socket paths is limited."""
    root = Path(tempfile.mkdtemp(prefix="cs-"))
    for name in [
        name for name in os.environ if name.startswith(("COLDSTART_", "HF_", "VLLM_CPU_KVCACHE_SPACE"))
    ]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(root), "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
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
    """Return fake_engine(behaviour), which replaces new engine processes by fake_engine.py with that behaviour."""

    real = sys.executable

    def choose(behaviour: str) -> None:
        script = tmp_path / "python"
        # Set in the script, because a template receives few variables of the environment.
        fake = f'FAKE_BEHAVIOUR={behaviour} exec "{real}" "{FAKE}"'
        script.write_text(f'#!/bin/sh\n{fake} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return choose


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set of features whose integration points the installed vLLM lacks, because of REASON."""
    held: set[str] = set()
    monkeypatch.setattr(
        compat, "find_unsupported_reason", lambda feature, load=None: REASON if feature in held else None
    )
    return held


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    """A model directory whose only weight file is not in the safetensors format."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "pytorch_model.bin").write_bytes(b"weights" * 999)
    return ResolvedModel("tiny", directory, None, None, {})


@pytest.fixture
def publish(home: Path, store: Store, tmp_path: Path) -> Publish:
    """Return publish(**sections), which creates a bundle with code and JSON sections, signed by this user's key."""

    def make(signer: sign.HostKey | None = None, **sections: object) -> Bundle:
        code = write_tree(tmp_path / "scratch" / "compile", CODE)
        signer = signer or sign.load_host_key(paths.state_dir())
        return publish_sections(store, signer=signer, compile=code, **sections)

    return make
