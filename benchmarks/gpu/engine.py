"""vLLM's engine with restored CUDA graphs against its own capture, in a small model with random weights: one JSON report.

Needs vLLM's GPU build with coldstart installed, so that vLLM finds the plug-in. Steps, the most informative first: a plain
start, the rounds that record and prove graphs as `materialize` does, then starts with restored graphs and plain starts in turn.
Each step is a process group with a time limit; one that fails does not stop the others. All processes import vLLM in parallel
before the first step. The report is written after every step, and the logs into a directory beside it.

Run: python -m benchmarks gpu/engine --out FILE [--shape llama2-7b] [--sizes all] [--rounds 2] [--park] [--seconds 270]
Time: less than 5 minutes on a GPU
Result: gpu/engine-llama2-7b-h100.json and other shapes beside it
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import parser
from benchmarks.gpu import engine_report
from benchmarks.gpu.engine_pool import PARK, ROOT, Pool
from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.contract.graphs import CANARY, EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import caches
from coldstart.materialize import graphs
from coldstart.system.timeline import Timeline

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 4,
         "vocab_size": 32000, "intermediate_size": 5632, "tie_word_embeddings": False}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "2048x4": LLAMA | {"hidden_size": 2048, "num_hidden_layers": 4},
    "qwen2-0.5b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
                   "tie_word_embeddings": True, "use_sliding_window": False},
    "llama2-7b": LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                          "num_key_value_heads": 32, "intermediate_size": 11008},
    "tiny": LLAMA | {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 512, "vocab_size": 512},
}  # fmt: skip
COMMON = {"torch_dtype": "bfloat16", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
          "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SIZES = "1,2,4,8"
LEAST_S, IMPORT_S = 5.0, 120.0
FIRST_S, START_S, RESERVE_S, SPARE = 120.0, 60.0, 50.0, 1
# Far below the default: vLLM refuses a start while memory of the previous process is still being freed.
UTILIZATION = "0.3"


def write_model(shape: str, place: Path) -> Path:
    """Write the configuration of a model whose weights vLLM draws."""
    target = place / f"model-{shape}"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return target


def vllm_args(sizes: str, kv_bytes: int) -> list[str]:
    """Return vLLM's arguments; `sizes` is a list such as 1,2,4, or all."""
    compilation: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if sizes != "all":
        compilation["cudagraph_capture_sizes"] = [int(size) for size in sizes.split(",")]
    words = [
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
        "--max-model-len",
        "1024",
        "--no-async-scheduling",
    ]
    words += ["--max-num-seqs", "256" if sizes == "all" else "16", "--kv-cache-memory-bytes", str(kv_bytes)]
    words += ["--gpu-memory-utilization", UTILIZATION]
    return [*words, "-cc", json.dumps(compilation, separators=(",", ":"))]


def environment(work: Path) -> dict[str, str]:
    """Return the variables of all processes: one set of caches, no network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    own = {
        "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary), "VLLM_CACHE_ROOT": str(work / "vllm"),
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    return dict(os.environ) | caches.environment(work / "caches") | own


@dataclass
class Run:
    """One run: its processes, its time limit and its report."""

    work: Path
    end: float
    out: Path | None
    model: Path
    arguments: list[str]
    pool: Pool
    report: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def step(
        self, label: str, task: EngineTask | None = None, *, limit: float = START_S, **env: str
    ) -> dict[str, Any]:
        """Run one engine process and add its row to the report."""
        row: dict[str, Any] = {"label": label, "ok": False}
        events = self.work / f"{len(self.steps)}.events"
        given = Arguments(self.arguments).prepend_model(str(self.model), "benchmark")
        plan = LaunchPlan(
            given, key="benchmark", env={str(TIMELINE_EVENTS): str(events)} | env, engine=task or EngineTask()
        )
        try:
            if self.left() < LEAST_S:
                raise TimeoutError("no time was left")
            process = self.pool.take(min(IMPORT_S, self.left()))
            process.name(label)
            row |= process.run(plan, max(LEAST_S, min(limit, self.left())))
            row["spans"] = Timeline.read(events).phases() if events.exists() else {}
        except (OSError, ValueError, RuntimeError) as error:  # a TimeoutError is an OSError
            row["error"] = f"{type(error).__name__}: {error}"
        self.add(row)
        return row

    def import_alone(self) -> None:
        """Measure an import while no other process runs."""
        row: dict[str, Any] = {"label": "import", "ok": False}
        try:
            if self.left() < LEAST_S:
                raise TimeoutError("no time was left")
            self.pool.close()
            process = self.pool.take(min(IMPORT_S, self.left()))
            row |= {"ok": True, "import_s": process.description()["import_s"]}
            process.end()
        except (OSError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        self.add(row)

    def record(self) -> Path | None:
        """Record and prove graphs as `materialize` does; return the section, or None with the reason in the report."""
        target, work, start = self.work / "graphs", self.work / "rounds", time.monotonic()

        def launch(name: str, task: EngineTask) -> None:
            # Without proven graphs the rest is worth little, so each of these steps may take most of the time.
            row = self.step(name, task, limit=self.left() - RESERVE_S)
            row["rounds"] = engine_report.describe_rounds(work)
            self.write()
            if not row["ok"]:
                raise CommandFailedError(f"{name}: {row.get('error')}")

        row: dict[str, Any] = {"label": "graphs", "ok": False}
        try:
            row["error"] = graphs.make(target, work, launch, Arguments(self.arguments))
            row["ok"] = row["error"] is None
        except Exception as error:  # noqa: BLE001 - plain starts are still worth their time
            row["error"] = f"{type(error).__name__}: {error}"
        row["seconds"] = round(time.monotonic() - start, 2)
        if target.is_dir():
            row["bundle"] = engine_report.describe_bundle(target)
        self.add(row)
        return target if row["ok"] else None

    def compare(self, section: Path | None, rounds: int) -> None:
        """Start with restored graphs and plain in turn."""
        for number in range(1, rounds + 1):
            label = f"restore.{number}"
            if section is None:
                self.add({"label": label, "ok": False, "error": "no graphs were recorded and proven"})
            else:
                row = self.step(label, EngineTask(restore=section))
                if number == 1 and row["ok"] and not _restored(row):
                    self.step("restore.without-canary", EngineTask(restore=section), **{str(CANARY): "0"})
            self.step(f"plain.{number + 1}")

    def park(self, section: Path | None) -> None:
        """Let the driver move an engine's device memory to host memory and back; the engine then answers again."""
        self.step("park", EngineTask(restore=section), **{PARK: "1"})

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, print it in short, and write the report."""
        self.steps.append(row)
        short = {name: row.get(name) for name in ("label", "ok", "seconds", "error")}
        print(json.dumps(short | {"left_s": round(self.left())}), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write the report with the conclusions so far."""
        if self.out:
            part = self.out.with_suffix(".part")
            part.write_text(json.dumps(self.finished(), indent=1) + "\n")
            part.replace(self.out)

    def finished(self) -> dict[str, Any]:
        """Return the report."""
        return {**self.report, "conclusions": engine_report.conclude(self.steps), "steps": self.steps}


def _restored(row: dict[str, Any]) -> list[str]:
    found: list[str] = ((row.get("result") or {}).get("graphs") or {}).get("restored", [])
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="2048x4")
    arguments.add_argument("--sizes", default=SIZES, help="batch sizes of the graphs, or all")
    arguments.add_argument("--rounds", type=int, default=2, help="starts with restored graphs")
    arguments.add_argument("--seconds", type=float, default=270.0, help="limit of the whole run")
    arguments.add_argument("--kv-bytes", type=int, default=256 << 20)
    arguments.add_argument(
        "--processes", type=int, help="imports in parallel at the beginning; default: one for each step"
    )
    arguments.add_argument(
        "--park", action="store_true", help="also checkpoint and restore an engine by the driver"
    )
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("vllm_args", nargs="*", help="after --")
    options = arguments.parse_args()
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="graphs-engine-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        logs = options.out.resolve().with_suffix(".logs") if options.out else work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        pool = Pool(logs, environment(work))
        given = [*vllm_args(options.sizes, options.kv_bytes), *options.vllm_args]
        run = Run(work, end, options.out, write_model(options.shape, work), given, pool)
        run.report = {
            "command": sys.argv, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "shape": options.shape,
            "vllm_args": given, "cpus": os.cpu_count(),
        }  # fmt: skip
        try:
            everything(run, options)
        finally:
            pool.close()
    print(json.dumps({"conclusions": run.finished()["conclusions"]}))
    sys.exit(0 if all(row["ok"] for row in run.steps) else 1)


def everything(run: Run, options: argparse.Namespace) -> None:
    """Run all steps, the most informative first."""
    start = time.monotonic()
    run.pool.start(options.processes or 4 + 2 * options.rounds + SPARE)
    run.report["processes"] = run.pool.settle(min(IMPORT_S, run.left()))
    run.report["parallel_imports_s"] = round(time.monotonic() - start, 2)
    run.write()
    run.step("plain.1", limit=FIRST_S)  # with cold caches
    section = run.record()
    run.compare(section, options.rounds)
    if options.park:
        run.park(section)
    run.import_alone()


if __name__ == "__main__":
    main()
