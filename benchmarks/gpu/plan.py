"""Start modes of a 7B model on one GPU against plain vLLM, in parts with a time limit each; every answer is written at once.

`probe` describes the machine, builds the model and times the imports. `device` measures copies and parked processes, and
inspects a process before its fork. `materialize` makes and proves the bundle. `compare` starts plain vLLM, plain vLLM with
every free option, and each start mode in turn, with rotated order. `rest` tries single options, and starts from a bundle with
CUDA graphs. A step that fails is recorded with the end of its log and does not stop the others. A rehearsal puts vLLM's CPU
build and a double of the driver in place of the GPU.

Run: python -m benchmarks gpu/plan [PART...] --out DIR [--seconds N] [--shape 7b]
Time: at most 28 minutes, as the parts' limits allow; on an H200 the last rounds of `compare` may be cut off
Result: gpu/plan-compare-h200.json and other parts beside it
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE
from typing import Any

from coldstart.artifacts.files import write_atomic

from benchmarks import llama
from benchmarks.common import ROOT, about, parser
from benchmarks.gpu import device, predict
from coldstart.bench import measure
from coldstart.system.proc import exits
from coldstart.validate.launch import Launcher, run_server
from coldstart.validate.launchers import (
    FULL_DECODE_ONLY,
    VLLM_FREE,
    VLLM_WARM,
    ModelUnderTest,
    ServeLauncher,
    VllmLauncher,
)

VLLM_ARGS = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.8", "--served-model-name", "m"]
# Eager, because a rehearsal shows that the steps run, and compilation on two cores would take most of its time.
REHEARSAL = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456", "--served-model-name", "m",
             "--enforce-eager"]  # fmt: skip
SLEEP, PROFILE = ["--enable-sleep-mode"], ["--profile-seconds", "120"]
PROMPT, TOKENS = "Once upon a time there was a server that waited for its first request", 16
REHEARSED = "rehearsal of a tiny model on vLLM's CPU build: it shows that the steps run, and its times say nothing about a GPU"
TAIL, END_S, LEAST_S, START_S = 4000, 10.0, 15.0, 180.0
REPORTED = ("mode", "fallbacks", "canary", "ready_s")


class Part:
    """One part: its time limit, its working directory and its report, which is written after each change."""

    def __init__(self, name: str, shape: str, work: Path, out: Path, seconds: float) -> None:
        rehearsed = "--rehearse" in sys.argv
        self.shape, self.work, self.end = shape, work, time.monotonic() + seconds
        self.model, self.logs = str(work / "model"), work / "logs"
        self.report: dict[str, Any] = {
            **about(), "kind": REHEARSED if rehearsed else "measured", "seconds": seconds, "answers": {},
        }  # fmt: skip
        self.place = out / f"{'rehearsal' if rehearsed else 'plan'}-{name}.json"
        self.logs.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the seconds that are left for a step."""
        return self.end - time.monotonic() - END_S

    def answer(self, name: str, work: Callable[[], Any]) -> Any:
        """Record what `work` returns, or why it failed, and its seconds; None after a failure or without time."""
        start, row = time.monotonic(), dict[str, Any]()
        if self.left() + END_S < LEAST_S:
            row["error"] = "no time was left"
        else:
            try:
                row["found"] = work()
            except Exception as error:  # noqa: BLE001 - one failed answer must not lose the others
                row["error"] = f"{type(error).__name__}: {error}".replace(sys.prefix, "")[-TAIL:]
        row["seconds"] = round(time.monotonic() - start, 2)
        self.report["answers"][name] = row
        write_atomic(self.place, (json.dumps(self.report, indent=1) + "\n").encode())
        print(json.dumps({"answer": name, "left": round(self.left()), **row})[:TAIL], flush=True)
        return row.get("found")

    def run(self, name: str, *command: str) -> str:
        """Run a command and return its standard output. Raises RuntimeError with the ends of its output and of its log."""
        log = self.logs / f"{name}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=errors, process_group=0)
        try:
            output = process.communicate(timeout=max(1.0, self.left()))[0].decode()
            problem = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            problem, output = "did not end in time", (error.output or b"").decode(errors="replace")
        if problem:
            raise RuntimeError(f"{problem}: {output[-TAIL:]}\n{exits.read_log_tail(log)}")
        return output

    def coldstart(self, name: str, *words: str) -> str:
        """Run a command of this interpreter's coldstart."""
        return self.run(name, sys.executable, "-m", "coldstart.commands.cli", *words)

    def read_json(self, name: str, *words: str) -> None:
        """Record what a command of coldstart prints as JSON."""
        self.answer(name, lambda: json.loads(self.coldstart(name.replace(" ", "-"), *words)))

    def ask(self, name: str, *words: str) -> None:
        """Record the answer of a process to a question of `gpu/device`."""
        command = (sys.executable, "-X", "importtime", "-m", "benchmarks.gpu.device", *words)
        self.answer(name, lambda: json.loads(self.run(name, *command).splitlines()[-1]))

    def start(self, name: str, launcher: Launcher) -> dict[str, Any]:
        """Start a server, measure it until it has answered, and end it."""
        settings = measure.RunSettings(
            (PROMPT,), TOKENS, min(START_S, self.left()), measure_steady_state=False
        )
        shutil.rmtree(self.logs / name, ignore_errors=True)
        before = measure.read_cpu_s()
        with run_server(launcher, self.logs / name) as server:
            run = measure.measure(launcher, server, settings, 0, before)
            return {
                "first_token_s": round(run.first_token_s, 3), "tokens": run.responses[0][0], "gpu": gpu_memory(),
                "phases": run.phases, "stages": run.stages, "report": {one: run.readiness.get(one) for one in REPORTED},
            }  # fmt: skip

    def serve(self, mode: str, number: int, *more: str, capture: str = "all") -> dict[str, Any]:
        """Measure `coldstart serve` in one start mode."""
        options = ("--capture", capture, "--on-miss", "warn")
        subject = ModelUnderTest(self.model, self.model, (*VLLM_ARGS, *SLEEP, *more), options)
        return self.start(f"{mode}-{number}", ServeLauncher(subject, mode, self.work / "run"))

    def plain(self, mode: str, number: int, *more: str) -> dict[str, Any]:
        """Measure plain vLLM; its first start fills its own caches."""
        subject = ModelUnderTest(self.model, self.model, (*VLLM_ARGS, *more))
        return self.start(f"{mode}-{number}", VllmLauncher(subject, self.work / "plain", mode))

    def compare_modes(self) -> dict[str, tuple[float, float]]:
        """Return the median time to the first token of plain vLLM over that of each mode that ran, and what was asked."""
        found = predict.find_measured(self.report)
        over = {mode: median(found["plain"]) / median(found[mode]) for mode in BARS if mode in found}
        return {mode: (round(ratio, 2), BARS[mode]) for mode, ratio in over.items()}

    def template(self, mode: str) -> None:
        """Start the template of a start mode, and record the memory of the device that it leaves."""
        limit = ("--ready-timeout", str(max(1.0, self.left())))
        subject = ModelUnderTest(self.model, self.model, (*VLLM_ARGS, *SLEEP), limit)
        self.answer(f"prepare {mode}", ServeLauncher(subject, mode, self.work / "run").prepare)
        self.answer(f"memory, {mode}", gpu_memory)


def environment(work: Path) -> dict[str, str]:
    """Return the variables of all processes: one set of caches below `work`, no network."""
    return {
        "COLDSTART_CACHE_DIR": str(work / "cache"), "XDG_STATE_HOME": str(work / "state"), "XDG_RUNTIME_DIR": str(work / "run"),
        "VLLM_CACHE_ROOT": str(work / "plain" / "vllm"), "TRITON_CACHE_DIR": str(work / "plain" / "triton"),
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def use_double(place: Path) -> dict[str, str]:
    """Return the variables with which processes find a double of the CUDA driver, built from the tests' source."""
    place.mkdir(parents=True, exist_ok=True)
    source = ROOT / "tests" / "support" / "graphs" / "fake_cuda.c"
    options = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", place / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(place), "CUDA_FAKE_CHECKPOINTS": str(place)}


def gpu_memory(query: str = "memory.used,memory.total") -> str | None:
    """Return the used and the total memory of the device, as nvidia-smi prints them; None without it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return None


def probe(part: Part) -> None:
    """Describe the machine and build the model."""
    part.answer("device", lambda: gpu_memory("name,driver_version,memory.total"))
    part.answer("model", lambda: llama.build(part.shape, Path(part.model)))
    part.read_json("doctor", "doctor", "--format", "json")
    for switch in ("disable", "enable"):
        part.ask(f"imports, collector {switch}d", "time_imports", switch)


def ask_device(part: Part) -> None:
    """Measure copies and parked processes, and inspect a process before its fork."""
    for kind in device.KINDS:
        part.ask(f"copy from {kind}", "hold", "4", "4", kind)
    part.ask("park 0.5 GiB, and 8 GiB of pinned host memory", "park", "0.5", "8", device.ARENA)
    before = device.HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    try:
        for setting in ("madvise", "always"):
            part.answer(f"set huge pages to {setting}", partial(device.HUGE_PAGES.write_text, setting))
            part.ask(f"park 8 GiB, huge pages {setting}", "park", "8", "0.5", device.PAGEABLE)
    finally:
        with suppress(OSError):
            device.HUGE_PAGES.write_text(before)
    part.ask("fork after the configuration", "inspect_fork", "--model", part.model, *VLLM_ARGS)


def materialize(part: Part) -> None:
    """Make and prove the bundle, and start once from it."""
    words = (part.model, "--format", "json", "--", *VLLM_ARGS, *SLEEP)
    part.read_json("materialize", "materialize", *PROFILE, *words)
    part.read_json("kv plan", "inspect", *words)
    part.answer("fresh", lambda: part.serve("fresh", 0))


ROUNDS = 3
BARS = {"fresh": 3.0, "template-runtime": 10.0, "standby": 40.0, "parked": 15.0}
# The short ones first, so that a part that is cut off has them.
SERVED, PLAIN = (
    ("standby", "parked", "template-runtime", "fresh"),
    {"plain": VLLM_WARM, "plain-free": VLLM_FREE},
)


def compare(part: Part) -> None:
    """Start each mode and plain vLLM in turn, in rotated order, and compare; plain vLLM first fills its caches."""
    for mode in ("template-runtime", "standby", "parked"):
        part.template(mode)
    for number in range(ROUNDS):
        order = [*SERVED, *PLAIN]
        for name in (*order[number:], *order[:number]):
            start = partial(part.plain, PLAIN[name]) if name in PLAIN else partial(part.serve, name)
            if name in PLAIN and number == 0:
                part.answer(f"{name}-0, fills its caches", partial(start, 0))
            part.answer(f"{name}-{number + 1}", partial(start, number + 1))
    part.end = max(part.end, time.monotonic() + 2 * LEAST_S)  # also after a part that was cut off
    part.answer("plain over each mode, and the bar", part.compare_modes)


def rest(part: Part) -> None:
    """Try single options, and start from a bundle with CUDA graphs."""
    part.answer("fresh, capture deferred", lambda: part.serve("fresh", 13, capture="deferred"))
    # vLLM captures each of these graphs as FULL, so a bundle may restore all of them; `plain-free` is the comparison.
    words = ("--format", "json", part.model, "--", *VLLM_ARGS, *SLEEP, "-cc", FULL_DECODE_ONLY)
    part.read_json("materialize with graphs", "materialize", "--graphs", *words)
    part.read_json("graphs", "inspect", *words)
    part.answer("fresh with graphs", lambda: part.serve("fresh", 12, "-cc", FULL_DECODE_ONLY))
    part.answer("no warm-up", lambda: part.plain(VLLM_WARM, 14, "--kernel-config.enable_jit_warmup=false"))
    # Last, because every process after this line finds the package.
    os.environ["PYTHONPATH"] = f"{os.environ.get('PLAN_OPTIONAL', '')}:{os.environ['PYTHONPATH']}"
    for name, mode in (("instanttensor", VLLM_WARM), ("instanttensor, free options", VLLM_FREE)):
        part.answer(name, partial(part.plain, mode, 20, "--load-format", "instanttensor"))
    part.answer("instanttensor, fresh", lambda: part.serve("fresh", 21))


# Seconds of each part. On an H200 `materialize` took 193 s, and 24 starts of `compare` may take 800.
PARTS: dict[str, tuple[Callable[[Part], None], float]] = {
    "probe": (probe, 150.0), "device": (ask_device, 180.0), "materialize": (materialize, 300.0),
    "compare": (compare, 580.0), "rest": (rest, 450.0),
}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    arguments.add_argument("--shape", choices=llama.SHAPES, default="7b")
    arguments.add_argument("--work", type=Path, default=Path("build/gpu-plan"))
    arguments.add_argument("--seconds", type=float, help="limit of each part instead of its own")
    arguments.add_argument("--rehearse", action="store_true", help="run on a machine without a GPU")
    arguments.add_argument("--out", type=Path, required=True)
    options = arguments.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        arguments.error(f"unknown part {', '.join(sorted(unknown))}")
    if options.rehearse:
        # This process checks the modes, too.
        from tests.support.rehearsal import sitecustomize  # type: ignore[import-not-found]  # noqa: F401

        options.shape, VLLM_ARGS[:], PROFILE[1] = "tiny", REHEARSAL, "5"
    work, out = options.work.resolve(), options.out.resolve()
    os.environ |= environment(work)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if options.rehearse:
        paths = [str(ROOT / "tests" / "support" / "rehearsal"), *paths]
        os.environ |= use_double(work / "driver")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    (work / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        work_of, seconds = PARTS[name]
        part = Part(name, options.shape, work, out, options.seconds or seconds)
        try:
            work_of(part)
        finally:
            part.end = time.monotonic() + 60 + END_S
            with suppress(RuntimeError):
                part.coldstart("stop", "template", "stop", "--force")
        shutil.make_archive(str(part.place.parent / f"logs-{name}"), "xztar", part.logs)


if __name__ == "__main__":
    main()
