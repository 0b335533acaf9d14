"""Servers that stay up for the whole campaign: `coldstart serve`, forked from one engine template per KV pool.

The engine process is bound to the last core, its API server and this client to the others, so that no other
process uses the engine's core. An idle server costs memory only.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.bench.run_order import TEMPLATE_ENGINE
from coldstart.lab.live import Target
from coldstart.validate import process_tree
from coldstart.validate.launch import HOST, serving
from coldstart.validate.launchers import ServeLauncher, Subject, console

READY_S = 300.0
COUNTER = "coldstart_scheduler_"
WORK = {"iterations": "vllm:iteration_tokens_total_count", "evictions": "vllm:num_preemptions_total"}
"""vLLM's own metrics, summed over labels."""
QUIET = ("--stream-interval", "100000", "--disable-uvicorn-access-log")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model with one KV pool: what it is materialized for."""

    model: str
    vllm_args: tuple[str, ...]


@dataclass
class Server:
    """A `coldstart serve` that is ready."""

    port: int
    engine: set[int]
    warm: bool = False
    """Whether it has served a request."""

    @property
    def target(self) -> Target:
        url = f"http://{HOST}:{self.port}"
        name = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
        return Target(url, name, token_ids=True)

    def totals(self) -> dict[str, dict[str, float]]:
        """Return sums since the start: `counters` of our scheduler, empty for vLLM's own, and the engine's `work`."""
        lines = _get(f"http://{HOST}:{self.port}/metrics").splitlines()
        found = (line.split() for line in lines if line.startswith(COUNTER) and "{" not in line)
        counters = {name.removeprefix(COUNTER).removesuffix("_total"): float(value) for name, value in found}
        work = {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
            for name, metric in WORK.items()
        }
        processes = process_tree.snapshot()
        work["cpu_s"] = sum(processes[pid].own_s for pid in self.engine)
        return {"counters": counters, "work": work}


@dataclass
class Fleet:
    """Servers and templates of a campaign; `started` ends all of them."""

    work: Path
    started: ExitStack
    servers: dict[str, Server] = field(default_factory=dict)
    templates: dict[Bundle, Path] = field(default_factory=dict)
    """Runtime directory of each template."""

    def server(self, name: str, bundle: Bundle, options: Sequence[str]) -> Server:
        """Return the server of that name, started on first use. Raises SystemExit if it has a fallback."""
        if name not in self.servers:
            subject = Subject(bundle.model, bundle.model, (*bundle.vllm_args, *QUIET), tuple(options))
            launcher = ServeLauncher(subject, TEMPLATE_ENGINE, self._template(bundle))
            launched = self.started.enter_context(serving(launcher, self.work / name))
            report = launched.readiness(time.monotonic() + READY_S)
            if report["fallbacks"]:
                raise SystemExit(f"{name} did not start as requested: {report['fallbacks']}")
            self.servers[name] = Server(launched.files.port, _bind(int(str(report["pid"]))))
        return self.servers[name]

    def _template(self, bundle: Bundle) -> Path:
        if bundle not in self.templates:
            subprocess.run(
                [*console(), "materialize", bundle.model, "-q", "--", *bundle.vllm_args], check=True
            )
            # A runtime directory has one template of a level. The path of a Unix socket is limited to 107 bytes.
            runtime = self.work / f"run{len(self.templates)}"
            template = ServeLauncher(
                Subject(bundle.model, bundle.model, bundle.vllm_args), TEMPLATE_ENGINE, runtime
            )
            self.started.callback(template.close)
            template.prepare()
            self.templates[bundle] = runtime
        return self.templates[bundle]


def bind_client() -> None:
    """Bind this process to every core but the engines'."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)


def _bind(server_pid: int) -> set[int]:
    """Bind the engine to the last core of the machine and the server to the others; return the engine's processes."""
    cores = sorted(range(os.cpu_count() or 1))
    processes = set(process_tree.tree(process_tree.snapshot(), [server_pid]))
    for process in processes:
        mask = set(cores[:-1]) or set(cores) if process == server_pid else {cores[-1]}
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), mask)
    return processes - {server_pid}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())
