"""One user's machine, the results so far, and a `coldstart serve` under way."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.machine import Machine

from coldstart.machine.addresses import free_port
from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST

VLLM = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456")
# By default vLLM takes nearly all of the machine's memory: beside anything else it would not start.
EAGER = ("--max-model-len", "1024", "--enforce-eager", "--gpu-memory-utilization", "0.3")
READY_S = 120.0


@dataclass
class Run:
    """One user, the results so far, and when to stop."""

    machine: Machine
    deadline_s: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline_s

    def fail(self, what: str) -> None:
        """A finding, with no path of this machine."""
        self.findings.append(what.replace(str(self.machine.root), "HOME")[:600])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, whatever its code."""
        with (self.machine.root / "said").open("w+") as said:
            process = self.machine.start(*words, stdout=said, stderr=said)
            code = process.wait(timeout=600)
            said.seek(0)
            return subprocess.CompletedProcess(words, code, said.read(), "")


@dataclass
class Started:
    """A `coldstart serve` under way."""

    process: subprocess.Popen[bytes]
    ready: Path
    log: Path
    port: int

    def await_ready(self) -> dict[str, Any] | None:
        """The ready file, None where the command ended without; what takes too long is killed."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.ready.exists():
                return dict(json.loads(self.ready.read_text()))
            if self.process.poll() is not None:
                return None
            time.sleep(0.02)
        self.process.kill()
        return None

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(timeout=90)


@contextlib.contextmanager
def serving(run: Run, model: str, *options: str, vllm: tuple[str, ...] = VLLM) -> Iterator[Started]:
    """`coldstart serve`, killed at the end of the block where it still runs; its files go."""
    place = run.machine.root / "served"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    port = free_port()
    words = ["serve", model, "--port", str(port), "--ready-file", str(place / "ready.json"), *options]
    with (place / "log").open("wb") as log:
        process = run.machine.start(*words, "--", *vllm, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Started(process, place / "ready.json", place / "log", port)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def answering(run: Run, one: Started, what: str) -> dict[str, Any] | None:
    """The ready file of a server that has answered a request too; None, and a finding, where there is none."""
    if (report := one.await_ready()) is None:
        run.fail(f"{what}: no server: {tail(one.log)}")
        return None
    try:
        CompletionClient(HOST, one.port).complete("Once upon a time", 4)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        run.fail(f"{what}: it does not answer: {error}")
    return report


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-6:])[-400:]
