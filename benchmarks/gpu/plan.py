"""Start modes of a 7B model on one GPU against plain vLLM, in parts with a time limit each; every answer is written at once.

`probe` describes the machine and builds the model. `materialize` makes and proves the bundle. `compare` starts plain vLLM,
plain vLLM with every free option, and each start mode in turn, with rotated order. `rest` parks a sleeping engine, tries
single options and starts from a bundle with CUDA graphs. A step that fails is recorded with the end of its log and does
not stop the others.

Run: python -m benchmarks gpu/plan [PART...] --out DIR [--seconds N] [--shape 7b]
Time: 14 minutes on an H100; the starts with graphs in `rest` were not timed yet
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import llama
from benchmarks.common import ROOT, about, parser
from coldstart.bench import stages
from coldstart.launch.completions import CompletionClient, NoAnswerError
from coldstart.system.ipc.addresses import free_port
from coldstart.system.timeline import Timeline
from coldstart.validate.launch import HOST
from coldstart.vllm.stock import ENTRY_POINT

VLLM_ARGS = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.8", "--served-model-name", "m"]
# Eager, because a rehearsal shows that the steps run, and compilation on two cores would take most of its time.
REHEARSAL = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456", "--served-model-name", "m",
             "--enforce-eager"]  # fmt: skip
SLEEP = ["--enable-sleep-mode"]
PROFILE = ["--profile-seconds", "120"]
PROMPT, TOKENS = "Once upon a time there was a server that waited for its first request", 16
REHEARSED = "rehearsal of a tiny model on vLLM's CPU build: it shows that the steps run, and its times say nothing about a GPU"
TAIL, END_S, LEAST_S = 4000, 20.0, 15.0
FULL_ONLY = '{"cudagraph_mode":"FULL_DECODE_ONLY"}'


class Part:
    """One part: its time limit, its working directory and its report, which is written after each change."""

    def __init__(self, name: str, work: Path, out: Path, seconds: float) -> None:
        rehearsed = "--rehearse" in sys.argv
        self.work, self.out, self.end = work, out, time.monotonic() + seconds
        self.report: dict[str, Any] = {
            **about(), "kind": REHEARSED if rehearsed else "measured", "seconds": seconds, "answers": {},
        }  # fmt: skip
        self.place = out / f"{'rehearsal' if rehearsed else 'plan'}-{name}.json"
        (work / "logs").mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def answer(self, name: str, work: Callable[[], Any]) -> Any:
        """Record what `work` returns, or why it failed, and its seconds; None after a failure or without time."""
        start, row = time.monotonic(), dict[str, Any]()
        if self.left() < LEAST_S:
            row["error"] = "no time was left"
        else:
            try:
                row["found"] = work()
            except Exception as error:  # noqa: BLE001 - one failed answer must not lose the others
                row["error"] = f"{type(error).__name__}: {error}"[-TAIL:]
        row["seconds"] = round(time.monotonic() - start, 2)
        self.report["answers"][name] = row
        part = self.place.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.place)
        short = {
            "answer": name,
            "s": row["seconds"],
            "left": round(self.left()),
            "error": row.get("error", "")[-700:],
        }
        print(json.dumps(short | _brief(row.get("found"))), flush=True)
        return row.get("found")

    def run(self, name: str, *command: str, limit: float = 600.0, **env: str) -> str:
        """Run a command and return its standard output. Raises RuntimeError with the end of its log."""
        log = self.work / "logs" / f"{name}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(self.work) | env,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=max(1.0, min(limit, self.left() - END_S / 2)))
            except subprocess.TimeoutExpired:
                end(process)
                raise RuntimeError(f"did not end in time: {tail(log)}") from None
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {output.decode()[-TAIL:]}\n{tail(log)}")
        return output.decode()

    @contextmanager
    def server(self, name: str, *command: str, limit: float = 120.0, **env: str) -> Iterator[dict[str, Any]]:
        """Start a server, measure it until it has answered, and end it after the block."""
        port, log, events = (
            free_port(HOST),
            self.work / "logs" / f"{name}.log",
            self.work / "logs" / f"{name}.events",
        )
        events.unlink(missing_ok=True)
        own = {"COLDSTART_TIMELINE_EVENTS": str(events)}
        began, start = time.time(), time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in command],
                stdout=output, stderr=output, env=environment(self.work) | own | env, start_new_session=True,
            )  # fmt: skip
        try:
            found = measure(process, port, start, min(limit, self.left() - END_S / 2))
            found |= {"began": began, "gpu": gpu_memory()}
            with suppress(OSError, ValueError):
                timeline = Timeline.read(events)
                found["spans"] = timeline.phases()
                found["stages"] = stages.measure(timeline.spans, start, start + found["first_token_s"])
            yield found
        except (NoAnswerError, RuntimeError) as error:
            raise RuntimeError(f"{error}: {tail(log)}") from error
        finally:
            end(process)


def measure(process: subprocess.Popen[bytes], port: int, start: float, limit: float) -> dict[str, Any]:
    """Return the seconds until a server that starts listens and until its first token, and its greedy tokens.

    Raises RuntimeError if the server ended, and NoAnswerError at the limit.
    """

    def check() -> None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")

    client = CompletionClient(HOST, port)
    first = client.first_token(PROMPT, deadline_s=start + limit, check=check)
    answer = client.complete(PROMPT, TOKENS)
    return {
        "listening_s": round(first.listening_s - start, 3), "first_token_s": round(first.token_s - start, 3),
        "tokens": list(answer.tokens), "answer_s": round(answer.seconds, 4),
    }  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: first in order, then by force."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-TAIL:] if log.exists() else ""


def environment(work: Path) -> dict[str, str]:
    """Return the variables of all processes: one set of caches below `work`, no network."""
    caches = work / "plain"
    own = {
        "COLDSTART_CACHE_DIR": str(work / "cache"), "XDG_STATE_HOME": str(work / "state"), "XDG_RUNTIME_DIR": str(work / "run"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"), "TRITON_CACHE_DIR": str(caches / "triton"), "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return dict(os.environ) | own


def gpu_memory(query: str = "memory.used,memory.total") -> str | None:
    """Return the used and the total memory of the device, as nvidia-smi prints them; None without it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return None


def coldstart(*words: str) -> list[str]:
    """Return the command line of this interpreter's coldstart."""
    return [sys.executable, "-m", "coldstart.commands.cli", *words]


def model_of(work: Path) -> str:
    """Return the directory of the model."""
    return str(work / "model")


def probe(part: Part, shape: str) -> None:
    """Describe the machine, build the model, and measure imports."""
    part.answer("device", lambda: gpu_memory("name,driver_version,memory.total"))
    part.answer("model", lambda: llama.build(shape, Path(model_of(part.work))))
    part.answer("doctor", lambda: json.loads(part.run("doctor", *coldstart("doctor", "--format", "json"))))
    part.answer("template imports", lambda: _script(part, "fork", FORK, model_of(part.work)))
    part.answer(
        "imports", lambda: {name: _script(part, "import", IMPORT, off) for name, off in IMPORTS.items()}
    )


def _script(part: Part, name: str, text: str, *words: str) -> Any:
    """Run a Python text and return the JSON of its last line."""
    return json.loads(part.run(name, sys.executable, "-c", text, *words).splitlines()[-1])


IMPORTS = {"first": "collect", "collecting": "collect", "not collecting": "disable"}
IMPORT = """
import gc, time, sys
getattr(gc, sys.argv[1])()
start = time.perf_counter()
from coldstart.vllm.engine import server
server.import_runtime(); server.import_engine()
print(round(time.perf_counter() - start, 3))
"""

FORK = """
import faulthandler
faulthandler.dump_traceback_later(60)  # a script that is cut off shows where it was
import json, os, sys, threading, time
from pathlib import Path
from coldstart.vllm.engine import server
server.import_runtime(); server.import_engine()
args, _ = server.parse_args(["--model", sys.argv[1], "--max-model-len", "4096"])
start = time.perf_counter()
config = server.configure(args)
configured = time.perf_counter()
server.import_gpu_engine(config)
imported = time.perf_counter()
import torch
found = {"configure_s": configured - start, "import_gpu_engine_s": imported - configured,
         "v2_runner": config.use_v2_model_runner,
         "cuda_initialized": torch.cuda.is_initialized(), "threads": threading.active_count(),
         "device_files": sorted({t for t in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "nvidia" in t})}
reader, writer = os.pipe()
start = time.perf_counter()
if os.fork() == 0:
    try:
        torch.zeros(1, device="cuda")
        os.write(writer, str(time.perf_counter() - start).encode())
    except Exception as error:
        os.write(writer, str(error)[:1000].encode())
    os._exit(0)
os.close(writer)
found["fork_and_context_s"] = os.read(reader, 1000).decode() or "failed"
print(json.dumps(found))
"""


def materialize(part: Part, shape: str) -> None:
    """Make and prove the bundle, and start once from it."""
    words = (model_of(part.work), "--format", "json", "--", *VLLM_ARGS, *SLEEP)
    for name, command in (("materialize", "materialize"), ("kv plan", "inspect")):
        line = coldstart(command, *(PROFILE if name == "materialize" else ()), *words)
        part.answer(name, lambda line=line, command=command: json.loads(part.run(command, *line)))
    part.answer("fresh", lambda: _started(part, "fresh", 0))


def _serve(part: Part, mode: str, number: int, *more: str, capture: str = "all") -> tuple[str, ...]:
    ready = part.work / "logs" / f"{mode}-{number}.ready.json"
    own = (
        "serve",
        model_of(part.work),
        "--mode",
        mode,
        "--capture",
        capture,
        "--port",
        "{port}",
        "--ready-file",
        str(ready),
        "--on-miss",
        "warn",
    )
    return tuple(coldstart(*own, "--", *VLLM_ARGS, *SLEEP, *more))


def _plain(part: Part, *more: str) -> tuple[str, ...]:
    # vLLM's console script fails where the distribution is not called vllm, as that of the CPU build.
    return (
        sys.executable,
        "-m",
        ENTRY_POINT,
        "--model",
        model_of(part.work),
        *VLLM_ARGS,
        "--port",
        "{port}",
        *more,
    )


def _started(part: Part, mode: str, number: int, *more: str, capture: str = "all") -> dict[str, Any]:
    with part.server(f"{mode}-{number}", *_serve(part, mode, number, *more, capture=capture)) as found:
        with suppress(OSError, ValueError):
            report = json.loads((part.work / "logs" / f"{mode}-{number}.ready.json").read_text())
            found["report"] = {
                name: report.get(name)
                for name in ("mode", "fallbacks", "canary", "skipped", "phases", "ready_s")
            }
        return found


def _started_plain(part: Part, name: str, number: int, *more: str, **env: str) -> dict[str, Any]:
    with part.server(f"{name}-{number}", *_plain(part, *more), **env) as found:
        return found


FILLED, ROUNDS = ("plain", "plain-free"), 3
FREE = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_ENABLE_STARTUP_PLAN": "1"}


def compare(part: Part, shape: str) -> None:
    """Start plain vLLM and each mode in turn, in rotated order."""
    words = (model_of(part.work), "--", *VLLM_ARGS, *SLEEP)
    part.answer(
        "template",
        lambda: part.run("template", *coldstart("template", "start", "--level", "runtime", *words)),
    )
    part.answer(
        "sleeping engine",
        lambda: part.run("asleep", *coldstart("template", "start", "--level", "asleep-1", *words)),
    )
    part.answer("memory asleep", gpu_memory)
    # The short ones first, so that a part that is cut off has them; the first plain start fills vLLM's own caches.
    starts: dict[str, Callable[[int], Any]] = {
        "standby": lambda n: _started(part, "standby", n),
        "template-runtime": lambda n: _started(part, "template-runtime", n),
        "fresh": lambda n: _started(part, "fresh", n),
        "plain": lambda n: _started_plain(part, "plain", n),
        "plain-free": lambda n: _started_plain(part, "plain-free", n, "-cc", FULL_ONLY, **FREE),
    }
    order = list(starts)
    for number in range(ROUNDS + 1):
        for name in order:
            if number > 0 or name in FILLED:
                part.answer(f"{name}-{number}", lambda name=name, number=number: starts[name](number))
        order = order[1:] + order[:1] if number else order


def rest(part: Part, shape: str) -> None:
    """Park a sleeping engine, try single options, and start from a bundle with CUDA graphs."""
    asleep = (model_of(part.work), "--", *VLLM_ARGS, *SLEEP)
    part.answer(
        "sleeping engine",
        lambda: part.run("asleep", *coldstart("template", "start", "--level", "asleep-1", *asleep)),
    )
    part.answer("standby before", lambda: _started(part, "standby", 10))
    part.answer("park", lambda: _park(part))
    part.answer("standby after", lambda: _started(part, "standby", 11))
    part.answer("fresh, capture deferred", lambda: _started(part, "fresh", 13, capture="deferred"))
    path = {"PYTHONPATH": f"{os.environ.get('PLAN_OPTIONAL', '')}:{os.environ.get('PYTHONPATH', '')}"}
    part.answer(
        "instanttensor",
        lambda: _started_plain(part, "instanttensor", 1, "--load-format", "instanttensor", **path),
    )
    part.answer("instanttensor, free options", lambda: _started_plain(
        part, "instanttensor", 2, "--load-format", "instanttensor", "-cc", FULL_ONLY, **FREE, **path))  # fmt: skip
    # vLLM captures each of these graphs as FULL, so a bundle may restore all of them; `plain-free` is the comparison.
    words = ("--graphs", "--format", "json", "--", *VLLM_ARGS, *SLEEP, "-cc", FULL_ONLY)
    part.answer("materialize with graphs", lambda: json.loads(
        part.run("graphs", *coldstart("materialize", model_of(part.work), *words))))  # fmt: skip
    part.answer("fresh with graphs", lambda: _started(part, "fresh", 12, "-cc", FULL_ONLY))


PARK = """
import json, sys, time
from coldstart.graphs.cuda import driver
d, pid, steps = driver.bindings(), int(sys.argv[1]), []
driver.primary_context()  # restoring needs an initialized driver
for step in ("Lock", "Checkpoint", "Restore", "Unlock"):
    arguments = None
    if step == "Lock":
        arguments = d.CUcheckpointLockArgs()
        arguments.timeoutMs = 10_000
    start = time.perf_counter()
    code = getattr(d, f"cuCheckpointProcess{step}")(pid, arguments)[0].name
    steps.append({"step": step.lower(), "code": code, "seconds": round(time.perf_counter() - start, 4)})
    print(steps[-1], file=sys.stderr, flush=True)  # the next step may block
print(json.dumps(steps))
"""


def _park(part: Part) -> list[dict[str, Any]]:
    """Let the driver move the memory of the process that sleeps on the device to host memory and back."""
    query = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    listed = part.run("apps", *query).strip()
    pids = [int(line.split(",")[0]) for line in listed.splitlines() if line.strip()] or _engine_pids()
    found: list[dict[str, Any]] = [{"listed": listed, "pids": pids, "before": gpu_memory()}]
    found += [{"pid": pid, "steps": _script(part, "park", PARK, str(pid))} for pid in pids]
    return found


def _engine_pids() -> list[int]:
    """Return the processes that have a device file open, for a machine on which nvidia-smi lists none."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any("/dev/nvidia0" in str(fd.readlink()) for fd in (entry / "fd").iterdir()):
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid()]


def _brief(found: Any) -> dict[str, Any]:
    names = ("listening_s", "first_token_s", "gpu", "report")
    return {name: found[name] for name in names if name in found} if isinstance(found, dict) else {}


PARTS: dict[str, Callable[[Part, str], None]] = {
    "probe": probe, "materialize": materialize, "compare": compare, "rest": rest,
}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    arguments.add_argument("--shape", choices=llama.SHAPES, default="7b")
    arguments.add_argument("--work", type=Path, default=Path("build/gpu-plan"))
    arguments.add_argument("--seconds", type=float, default=300.0, help="limit of each part")
    arguments.add_argument("--rehearse", action="store_true", help="run on a machine without a GPU")
    arguments.add_argument("--out", type=Path, required=True)
    options = arguments.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        arguments.error(f"unknown part {', '.join(sorted(unknown))}")
    if options.rehearse:
        options.shape, VLLM_ARGS[:] = "tiny", REHEARSAL
        SLEEP.clear()
        PROFILE[1] = "5"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name in options.parts or PARTS:
        run_part(name, options.work.resolve(), options.out.resolve(), options.seconds, options.shape)


def run_part(name: str, work: Path, out: Path, seconds: float, shape: str) -> None:
    """Run one part and pack its logs; templates end with it."""
    part = Part(name, work, out, seconds)
    (part.work / "run").mkdir(mode=0o700, exist_ok=True)
    try:
        PARTS[name](part, shape)
    finally:
        subprocess.run(
            coldstart("template", "stop", "--force"), env=environment(part.work), check=False, timeout=60
        )
    for log in (part.work / "logs").glob("*.log"):
        with suppress(OSError):
            (part.out / "logs").mkdir(exist_ok=True)
            (part.out / "logs" / log.name).write_text(log.read_text(errors="replace")[-200_000:])
    shutil.make_archive(str(part.out / f"logs-{name}"), "xztar", part.out / "logs")
    shutil.rmtree(part.out / "logs")


if __name__ == "__main__":
    main()
