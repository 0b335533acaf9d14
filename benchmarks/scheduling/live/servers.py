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
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.lab.replay.client import Target
from coldstart.lab.replay.http import Endpoint
from coldstart.system.ipc.addresses import free_port
from coldstart.validate import process_tree
from coldstart.validate.launch import HOST
from coldstart.validate.launchers import console

READY_S = 300.0
COUNTER = "coldstart_scheduler_"
WORK = {"iterations": "vllm:iteration_tokens_total_count", "evictions": "vllm:num_preemptions_total"}
"""vLLM's own metrics, summed over labels."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model with one KV pool: what it is materialized for."""

    model: str
    vllm_args: tuple[str, ...]


@dataclass
class Server:
    """A `coldstart serve` that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    report: dict[str, object]
    engine: set[int]
    warm: bool = False
    """Whether it has served a request."""

    @property
    def target(self) -> Target:
        url = f"http://{HOST}:{self.port}"
        name = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
        return Target(Endpoint.parse(url, "/v1/completions"), name, url, token_ids=True)

    def totals(self) -> dict[str, dict[str, float]]:
        """Since the server's start: `counters` of our scheduler, empty for vLLM's own, and the engine's `work`."""
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
    """Everything that was started; `close` ends it."""

    work: Path
    servers: dict[str, Server] = field(default_factory=dict)
    templates: set[Bundle] = field(default_factory=set)

    def server(self, name: str, bundle: Bundle, options: Sequence[str]) -> Server:
        """The server of that name, started on first use."""
        if name not in self.servers:
            self._template(bundle)
            self.servers[name] = self._start(name, bundle, options)
        return self.servers[name]

    def end(self, name: str) -> None:
        server = self.servers.pop(name)
        server.process.terminate()
        server.process.wait(timeout=60)

    def close(self) -> None:
        for name in list(self.servers):
            self.end(name)
        for _ in self.templates:
            self._run("template", "stop", "--level", "engine", "--force")
            self.templates = set()
            return

    def materialize(self, bundle: Bundle, *, force: bool = False) -> None:
        self._run("materialize", bundle.model, *["--force"] * force, "--", *bundle.vllm_args)

    def _template(self, bundle: Bundle) -> None:
        if bundle in self.templates:
            return
        self.materialize(bundle)
        self._run("template", "start", bundle.model, "--level", "engine", "--", *bundle.vllm_args)
        self.templates.add(bundle)

    def _start(self, name: str, bundle: Bundle, options: Sequence[str]) -> Server:
        port, ready = free_port(), self.work / f"{name}.json"
        ready.unlink(missing_ok=True)
        argv = [*console(), "serve", bundle.model, "--mode", "template-engine", "--port", str(port)]
        argv += ["--ready-file", str(ready), *options, "--", *bundle.vllm_args]
        argv += ["--stream-interval", "100000", "--disable-uvicorn-access-log"]
        with (self.work / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                argv, env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            report = self._ready(name, process, ready)
            if report["fallbacks"]:
                raise SystemExit(f"{name} did not come up as asked: {report['fallbacks']}")
            engine = _bind(int(str(report["pid"])))
        except BaseException:
            process.terminate()  # no other code has a reference to it yet
            process.wait(timeout=60)
            raise
        return Server(process, port, report, engine)

    def _ready(self, name: str, process: subprocess.Popen[bytes], ready: Path) -> dict[str, object]:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self.work / f"{name}.log").read_text(errors="replace")[-3000:]
                raise SystemExit(f"the server {name} did not come up:\n{tail}")
            time.sleep(0.02)
        return dict(json.loads(ready.read_text()))

    def _environment(self) -> dict[str, str]:
        runtime = self.work / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        return {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}

    def _run(self, *arguments: str) -> None:
        with (self.work / "commands.log").open("ab") as log:
            argv = [*console(), *arguments]
            done = subprocess.run(argv, env=self._environment(), stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"coldstart {' '.join(arguments)} failed: {self.work / 'commands.log'}")


def bind_client() -> None:
    """This process to every core but the engines'."""
    os.sched_setaffinity(0, _others())


def _others() -> set[int]:
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[:-1]) or set(cores)


def _bind(server_pid: int) -> set[int]:
    """The engine (the server's child) to the last core of the machine, the server to the others; the engine's processes."""
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
