"""Start modes of a real server on a GPU against plain vLLM, cold and warm: one JSON report.

Needs vLLM's GPU build with coldstart installed, a model directory or `--random` (0.5b or 7b), and twice the model's bytes of
free disk. Steps: doctor, materialize, `coldstart bench` of every mode that doctor reports as available. A step that fails is
recorded with the end of its log and does not stop the others. The report is written after every step.

Run: python -m benchmarks gpu/serve --model DIR | --random 0.5b [--out FILE]
Time: about 10 minutes on a GPU
Result: gpu/serve-h100.json (the last step did not end in time)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import parser
from benchmarks.weights import checkpoint

# Layers, hidden and inner size, heads and KV heads.
SHAPES = {"0.5b": (24, 896, 4864, 14, 2), "7b": (32, 4096, 11008, 32, 32)}
FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
LEAST_S, ENDING_S = 20.0, 15.0
STDERR = 6000


def needs(bytes_: int, place: Path) -> list[str]:
    """Return a message for each missing requirement of a run."""
    missing = []
    if shutil.which(_console()) is None:
        missing.append(
            "coldstart is not installed in this interpreter's environment: python -m pip install '.[gpu]' in the checkout"
        )
    free = shutil.disk_usage(place).free
    if free < 2 * bytes_:
        missing.append(
            f"{2 * bytes_ / 1e9:.0f} GB are needed in {place}, {free / 1e9:.0f} GB are free: --work DIR"
        )
    return missing


def _console() -> str:
    beside = Path(sys.executable).with_name("coldstart")
    return str(beside) if beside.exists() else shutil.which("coldstart") or str(beside)


def random_model(shape: str) -> Path:
    """Return the directory of a Llama of that shape with seeded random weights in bf16, built on first use."""
    sizes = dict(zip(FIELDS, SHAPES[shape], strict=True))
    return checkpoint.built({**checkpoint.CONFIG, **sizes, "max_position_embeddings": 4096})


def _ended(argv: list[str], left: float) -> subprocess.CompletedProcess[str]:
    """Run a command like subprocess.run, but end it with a signal at its timeout, so that it can stop its processes."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
    try:
        output, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


@dataclass
class Run:
    """Sequence of steps that share a time limit; `report` is written after each."""

    out: Path | None
    end: float
    report: dict[str, Any] = field(default_factory=lambda: {"steps": []})

    def step(self, name: str, *arguments: str, result: Path | None = None) -> Any:
        """One coldstart command; its JSON, or None with the reason in the report."""
        left, start = self.end - time.monotonic(), time.monotonic()
        row: dict[str, Any] = {"step": name, "command": ["coldstart", *arguments], "ok": False}
        self.report["steps"].append(row)
        try:
            if left < LEAST_S:
                raise TimeoutError("no time was left")
            done = _ended([_console(), *arguments], left)
            row |= {"exit": done.returncode, "end": done.stderr[-STDERR:]}
            text = result.read_text() if result and result.exists() else done.stdout
            row["result"] = json.loads(text)
            row["ok"] = done.returncode == 0
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired, TimeoutError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[-2000:]
        row["seconds"] = round(time.monotonic() - start, 1)
        self.write()
        return row.get("result")

    def write(self) -> None:
        """Write the current report."""
        if self.out:
            self.out.write_text(json.dumps(self.report, indent=1) + "\n")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="a directory, an alias or a repository")
    arguments.add_argument("--random", choices=SHAPES, help="make a model with random weights")
    arguments.add_argument("--work", type=Path, default=Path("build/serve-gpu"))
    arguments.add_argument("--minutes", type=float, default=9.8)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("vllm_args", nargs="*", help="after --")
    options = arguments.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    wanted = {"0.5b": 1_000_000_000, "7b": 14_000_000_000}.get(options.random or "", 0)
    if missing := needs(wanted, options.work):
        sys.exit("; ".join(missing))
    run, work = Run(options.out, end), options.work.resolve()
    os.environ["COLDSTART_CACHE_DIR"] = str(work / "cache")  # also of the random model
    model = str(random_model(options.random)) if options.random else options.model or "tiny-llama"
    passed = ["--", *options.vllm_args] if options.vllm_args else []
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run.report |= {"command": sys.argv, "date": date, "model": model}
    run.step("doctor", "doctor", "--format", "json")
    run.step("materialize", "materialize", model, "--format", "json", *passed)
    exported = work / "bench.json"
    export = f"--export=json={exported}"
    run.step("bench", "bench", model, f"--runs={options.runs}", export, *passed, result=exported)
    run.write()
    print(json.dumps({row["step"]: row["ok"] for row in run.report["steps"]}))
    sys.exit(0 if all(row["ok"] for row in run.report["steps"]) else 1)


if __name__ == "__main__":
    main()
