"""Time from process launch to the first token over HTTP, for plain vLLM and every start mode.

A start imports torch and vLLM once, loads the weights and computes one token. Everything else that vLLM does at a start
was done before for the same key. The floor of a mode is measured in the same run: a process that imports the same modules
(`fresh`) or a fork (other modes), plus one first token of a running server. Runs are interleaved and their order rotates;
figures are medians with their range. Measured on the CPU.

With `--up` it measures `coldstart up` beside plain vLLM instead: each round has the first `up` on an empty cache, which builds
the bundle and the template, plain vLLM with its own caches warm, and the second `up`.

Run: python -m benchmarks start/cold_start [--runs N] [--export FORM=FILE]
     python -m benchmarks start/cold_start --up ROUNDS
Time: about 40 minutes for 5 runs; with --up about 4 minutes for each round
Result: cold-start-cpu.json (with --up: up-cpu.json)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, about, finish
from coldstart.bench import facts
from coldstart.models import resolution
from coldstart.system.paths import Cache
from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST, Command, Launcher, RunFiles, serving
from coldstart.validate.launchers import ServeLauncher, Subject, VllmLauncher, console, runtime_variables

RESULT = RESULTS / "cold-start-cpu.json"
MODEL = "tiny-llama"
VLLM_ARGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456"]
FIRST_UP, PLAIN, SECOND_UP = "first up", "vLLM, warm caches", "second up"
LONGEST_S = 1800.0


@dataclass(frozen=True)
class ServeUp(ServeLauncher):
    """`coldstart up`, which chooses the start mode."""

    def command(self, files: RunFiles) -> Command:
        argv = [*console(), "up", self.subject.model, *self.subject.common_args, "--format", "json"]
        argv += ["--output", str(files.ready), "--host", HOST, "--port", str(files.port)]
        return Command([*argv, *self.subject.passed_args], runtime_variables(self.runtime))


def main(arguments: list[str]) -> int:
    """Run the bench, keep its JSON, print the table for people and the JSON in one last line."""
    if arguments[:1] == ["--up"]:
        measure_up(int(arguments[1]))
        return 0
    command = [
        str(Path(sys.executable).with_name("coldstart")),
        "bench",
        MODEL,
        f"--export=json={RESULT}",
        *arguments,
    ]
    code = subprocess.run([*command, "--", *VLLM_ARGS], check=False).returncode
    if RESULT.exists():
        print(json.dumps(json.loads(RESULT.read_text()), separators=(",", ":")))
    return code


def measure_up(rounds: int) -> None:
    """Measure `coldstart up` twice beside plain vLLM in each round, and store the result after each."""
    path = str(resolution.resolve(MODEL, revision=None, offline=True, cache=Cache.at()).path)
    times: dict[str, list[float]] = {FIRST_UP: [], PLAIN: [], SECOND_UP: []}
    modes = []
    with tempfile.TemporaryDirectory(prefix="cs-up-") as name:
        place = Path(name)
        plain = VllmLauncher(Subject(MODEL, path, tuple(VLLM_ARGS)), place / "caches", warm=True)
        empty_s, _ = first_token(plain, place / "empty")
        for number in range(rounds):
            here = place / str(number)
            common = ("--cache-dir", str(here / "cache"), "--offline")
            up = ServeUp(Subject(MODEL, path, tuple(VLLM_ARGS), common), "", here / "run")
            try:
                for which, launcher in ((FIRST_UP, up), (PLAIN, plain), (SECOND_UP, up)):
                    seconds, mode = first_token(launcher, here / which)
                    times[which].append(seconds)
                    print(number, which, f"{seconds:.2f} s", mode, flush=True)
                modes.append(mode)
            finally:
                variables = os.environ | runtime_variables(here / "run")
                subprocess.run([*console(), "template", "stop"], env=variables, check=True)
            store_up(times, modes, empty_s)


def store_up(times: Mapping[str, list[float]], modes: list[str], empty_s: float) -> None:
    """Store the seconds of each way of starting; `modes` are those of the second `up`."""
    medians = {which: statistics.median(taken) for which, taken in times.items()}
    document = {
        **about(),
        "versions": facts.versions(),
        "model": MODEL,
        "vllm_args": VLLM_ARGS,
        "empty_caches_s": empty_s,
        "first_token_s": times,
        "median_s": medians,
        "modes": modes,
        "ratios": {which: medians[PLAIN] / medians[which] for which in (FIRST_UP, SECOND_UP)},
    }
    finish("up-cpu", document)


def first_token(launcher: Launcher, directory: Path) -> tuple[float, str]:
    """Return the seconds from a launch to the first token, and the start mode that was used; empty for plain vLLM."""
    with serving(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port)
        deadline_s = time.monotonic() + LONGEST_S
        first = client.first_token("x", deadline_s=deadline_s, check=server.check)
        mode = str(server.readiness(deadline_s)["mode"]) if launcher.tells_readiness else ""
        return first.token_s - server.launched_s, mode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
