"""Two installations of coldstart, start against start: has a change made any start mode slower?

Each makes its own bundle (with a snapshot where COLDSTART_CRIU or PATH has CRIU) and keeps its own templates, in
folders of its own. In each round every mode is started by both in turn (who goes first changes from round to round),
from process launch to the first token over HTTP, on one and the same machine. Reported: the ratio this / other of each
pair, its median and its quartiles, and the ratio of two starts of the same installation in the same order of time (a
control: what noise alone makes). CPU only; nothing simulated.

    python benchmarks/paired_starts.py OTHER_COLDSTART [--name COMMIT] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles

from coldstart.machine.addresses import free_port
from coldstart.validate.completions import CompletionClient

RESULT = Path(__file__).parent / "results" / "paired-starts-cpu.json"
MODEL = "tiny-llama"
VLLM_ARGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456"]
MODES = ("auto", "fresh", "runtime-snapshot", "template-runtime", "template-engine", "snapshot")
DEADLINE_S = 300.0


class Installation:
    """One coldstart executable with folders of its own under `place`."""

    def __init__(self, executable: str, place: Path) -> None:
        # Of its own: what lies in the working directory must not be imported by the other installation.
        self.executable, self.place, self.log = executable, place, place / "log"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(place / "run")}
        for name, folder in (
            ("COLDSTART_CACHE_DIR", "cache"),
            ("XDG_STATE_HOME", "state"),
            ("XDG_CACHE_HOME", "home"),
            ("XDG_RUNTIME_DIR", "run"),
        ):
            self.environment[name] = str(place / folder)
            (place / folder).mkdir(mode=0o700, parents=True, exist_ok=True)

    def __call__(self, *words: str) -> None:
        """Run a command to its end; ends this program with what it printed last where it failed."""
        with self.log.open("ab") as log:
            command = [self.executable, *words]
            code = subprocess.run(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.place, check=False
            ).returncode
        if code:
            raise SystemExit(f"{' '.join(command)} ended with {code}: {self.log.read_text()[-2000:]}")

    def prepare(self, modes: list[str]) -> None:
        """The bundle, where there is none yet, a template of both levels, and the frozen runtime where it is started from."""
        if not (self.place / "cache" / "bundles").exists():
            self("materialize", MODEL, "--snapshot", "--", *VLLM_ARGS)
        for level in ("runtime", "engine"):
            self("template", "start", MODEL, "--level", level, "--", *VLLM_ARGS)
        if "runtime-snapshot" in modes:  # an older release has none: name the others with --modes
            self("template", "freeze")

    def start(self, mode: str) -> float:
        """Seconds from launch to the first token; the server has ended when this returns."""
        port = free_port()
        command = [self.executable, "serve", MODEL, "--mode", mode, "--port", str(port), "--", *VLLM_ARGS]
        with self.log.open("ab") as log:
            begun_s = time.monotonic()
            process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.place, start_new_session=True
            )
        try:

            def check() -> None:
                if process.poll() is not None:
                    raise SystemExit(
                        f"{self.executable}: {mode} ended with {process.returncode}: {self.log.read_text()[-2000:]}"
                    )

            client = CompletionClient("127.0.0.1", port)
            found = client.first_token("Once", deadline_s=begun_s + DEADLINE_S, check=check)
            return found.token_s - begun_s
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def spread(ratios: list[float]) -> Mapping[str, float]:
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "median": round(median(ratios), 3),
        "q1": round(low, 3),
        "q3": round(high, 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", help="the other installation's coldstart executable")
    parser.add_argument("--name", default="other", help="what to call it in the result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, help="where bundles of an earlier run lie, to be used again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="starts-") as place:
        sides = {
            "this": str(Path(sys.executable).with_name("coldstart")),
            options.name: options.other,
        }
        folder = options.folder or Path(place)
        found = measure(sides, folder, options.modes, options.rounds)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["ratios"], indent=1))
    return 0


def measure(executables: Mapping[str, str], place: Path, modes: list[str], rounds: int) -> dict[str, object]:
    sides = {name: Installation(path, place / name) for name, path in executables.items()}
    for name, side in sides.items():
        print(f"{name}: bundle, templates and one start of each mode", flush=True)
        side.prepare(modes)
        for mode in modes:
            print(f"  {mode}: {side.start(mode):.2f} s", flush=True)
    seconds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in sides} for mode in modes}
    try:
        for number in range(rounds):
            order = list(sides) if number % 2 else list(reversed(sides))
            for mode in modes:
                for name in order:
                    seconds[mode][name].append(sides[name].start(mode))
                print(
                    number,
                    mode,
                    {name: round(times[-1], 2) for name, times in seconds[mode].items()},
                    flush=True,
                )
    finally:
        for side in sides.values():
            side("template", "stop")
    ratios = {}
    for mode in modes:
        this, other = seconds[mode].values()
        ratios[mode] = {
            "this / other": spread([a / b for a, b in zip(this, other, strict=True)]),
            "control: other / other, next round": spread(
                [a / b for a, b in zip(other[1:], other[:-1], strict=True)]
            ),
        }
    return {
        "command": "python benchmarks/paired_starts.py",
        "sides": list(sides),
        "rounds": rounds,
        "seconds": seconds,
        "ratios": ratios,
    }


if __name__ == "__main__":
    sys.exit(main())
