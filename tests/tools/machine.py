"""A user at a machine of their own: home, XDG directories, cache root, working directory under one root.

What is run is the installed `coldstart` script; its environment owes nothing to the one of the tests.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import find_family, remaining

from coldstart.launch.completions import CompletionClient
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.snapshot import criu
from coldstart.validate.launch import HOST
from coldstart.validate.launchers import find_coldstart_command

PROJECT = Path(__file__).parents[2]
READY_S = 900.0
"""Long enough for a busy machine: a first compilation takes a minute on an idle one."""
PROMPTS = ("Once upon a time", "a b c d e f g", "The answer is")
VLLM = ("--max-model-len", "512", "--kv-cache-memory-bytes", "134217728")
EAGER = (*VLLM, "--enforce-eager")
"""For tests whose subject is not compiled code, which takes most of the time of a first start."""
Tokens = list[tuple[int, ...]]
_OURS = ("COLDSTART_", "HF_", "XDG_", "VLLM_", "TORCH", "TRITON_")


def find_criu() -> str | None:
    """Return the CRIU of the tests: COLDSTART_CRIU, the project's build, or the one in PATH."""
    unpacked = PROJECT / ".cache" / "criu" / "criu"
    return os.environ.get(criu.VARIABLE) or (str(unpacked) if unpacked.exists() else shutil.which("criu"))


def require_criu(patch: pytest.MonkeyPatch) -> None:
    """Use the CRIU of the tests in this process; skip the test if it cannot restore processes here."""
    patch.setenv(criu.VARIABLE, find_criu() or "")
    if (limit := criu.find_limit()) is not None:
        pytest.skip(limit[0])


@dataclass
class Served:
    """A `coldstart serve` that is ready: the process, its ready file, and a client."""

    process: subprocess.Popen[bytes]
    report: Mapping[str, Any]
    client: CompletionClient
    log: Path
    output: Path

    def tokens(self) -> Tokens:
        """Return the greedy tokens that follow each of PROMPTS."""
        return [self.client.complete(prompt, 16).tokens for prompt in PROMPTS]

    def family(self) -> list[psutil.Process]:
        """Return the supervisor, the server and all their descendants."""
        return find_family(self.process.pid, self.report["pid"])

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the supervisor; its exit code (128 + n after signal n)."""
        self.process.send_signal(number)
        return self.code()

    def code(self) -> int:
        """Wait for the supervisor; its exit code."""
        code = self.process.wait(timeout=60)
        return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class Machine:
    """One user. `extra` is set on top of the environment."""

    root: Path
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        """Return the cache root at its default location below the home."""
        return self.root / "home" / "cache" / "coldstart"

    def environment(self) -> dict[str, str]:
        """Return variables that set every directory below the root, a short iteration profile, and CRIU if available."""
        places = {"HOME": "home", "XDG_CACHE_HOME": "home/cache", "XDG_STATE_HOME": "home/state"}
        places |= {"XDG_CONFIG_HOME": "home/config", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
        made = {name: str(self._directory(place)) for name, place in places.items()}
        found = {"COLDSTART_CRIU": program} if (program := find_criu()) else {}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        fixed = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLDSTART_MATERIALIZE_PROFILE_SECONDS": "1"}
        return kept | made | found | fixed | dict(self.extra)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start `coldstart ARGUMENTS` in the working directory of this machine."""
        work = self._directory("work")
        return subprocess.Popen(
            [*find_coldstart_command(), *arguments],
            env=self.environment(),
            cwd=work,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run `coldstart ARGUMENTS` to its end; what it printed. Fails when it exits with another code or hangs."""
        with (self._directory("work") / "stderr").open("w+b") as errors:
            process = self.start(*arguments, stdout=subprocess.PIPE, stderr=errors)
            try:
                said, _ = process.communicate(timeout=READY_S)
            finally:
                process.terminate()  # a server that remains would disturb every test that follows
            errors.seek(0)
            assert process.returncode == code, errors.read().decode(errors="replace")[-6000:]
        return said.decode()

    @contextmanager
    def gateway(self, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
        """Run a host or a fleet on a free port; yield its process, its URL and its log."""
        log = self._directory(words[0]) / "log"
        with log.open("wb") as errors:
            process = self.start(*words, "--port", "0", stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line, log.read_text()
            yield process, line.split()[0], log
        finally:
            process.terminate()
            process.wait(120)

    def error(self) -> str:
        """Return the standard error of the last `run`."""
        return (self.root / "work" / "stderr").read_text(errors="replace")

    @contextmanager
    def serving(self, model: str, *arguments: str, vllm: Sequence[str] = VLLM) -> Iterator[Served]:
        """Run `coldstart serve`; it is ready in the block, and none of its processes remains afterwards."""
        port = find_free_port()
        place = self._directory(f"served-{port}")
        options = ["--port", str(port), "--ready-file", str(place / "ready.json"), *arguments, "--", *vllm]
        with (place / "log").open("wb") as log, (place / "out").open("wb") as out:
            process = self.start("serve", model, *options, stdout=out, stderr=log, start_new_session=True)
        family: list[psutil.Process] = []
        try:
            report = _ready(process, place / "ready.json", place / "log")
            served = Served(process, report, CompletionClient(HOST, port), place / "log", place / "out")
            family = served.family()
            yield served
        finally:
            process.terminate()
            process.wait(timeout=60)
            left = remaining(family)
        assert not left, f"processes outlive their server: {left}"

    def _directory(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


def _ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + READY_S
    while not ready.exists():
        said = f"\n{log.read_text(errors='replace')[-6000:]}"
        assert process.poll() is None, f"coldstart serve ended with {process.returncode}{said}"
        assert time.monotonic() < deadline_s, f"not ready in {READY_S} s{said}"
        time.sleep(0.05)
    return dict(json.loads(ready.read_text()))
