"""Processes of gpu/engine: they import vLLM in parallel and wait, so that no step contains an import or runs during one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldstart.contract.plan import LaunchPlan
from coldstart.system.proc import logs
from coldstart.system.proc.lifeline import SUPERVISOR_ENV

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu.engine_process"]
POLL_S, TRACE_S = 0.05, 1.0
PARK = "BENCHMARK_PARK"  # in a plan's environment: checkpoint and restore the engine
LOG_END, NOTABLE = 4000, ("coldstart", "WARNING", "ERROR")


class Process:
    """A process group that has imported vLLM, or is about to, and waits for its instruction."""

    def __init__(self, number: int, place: Path, environment: Mapping[str, str]) -> None:
        self._place, self._number = place, number
        self.ready, self.log = place / f"process-{number}.json", place / f"process-{number}.log"
        self.ready.unlink(missing_ok=True)  # of an earlier run
        supervisor = {str(SUPERVISOR_ENV): str(os.getpid())}
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*COMMAND, str(self.ready)], stdin=subprocess.PIPE, stdout=sink, stderr=sink,
                env=dict(environment) | supervisor, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def has_settled(self) -> bool:
        """Return whether the import has ended, in either way."""
        return self.ready.exists() or self.process.poll() is not None

    def description(self) -> dict[str, Any]:
        """Return the versions and the seconds of the import, or `error`."""
        try:
            return dict(json.loads(self.ready.read_text()))
        except (OSError, ValueError):
            code = self.process.poll()
            state = "did not end in time" if code is None else f"ended with exit code {code}"
            return {"error": f"the import of vLLM {state}"}

    def name(self, label: str) -> None:
        """Give the log the name of the step."""
        target = self._place / f"{label.replace(' ', '-').replace(',', '')}.log"
        self.log = self.log.rename(target)

    def run(self, plan: LaunchPlan, limit: float) -> dict[str, Any]:
        """Let the process do the work of a plan, end its group, and return `ok`, `result` and the reasons of a failure."""
        result, start = self.log.with_suffix(".json"), time.monotonic()
        row: dict[str, Any] = {"ok": False}
        try:
            self._instruct({"plan": plan.document(), "result": str(result)})
            code = self._wait(limit)
        except OSError as error:
            code = self.process.poll()
            row["error"] = f"cannot instruct the process: {error}"
        finally:
            self.end()
        row |= {"seconds": round(time.monotonic() - start, 2), "exit": code}
        with contextlib.suppress(OSError, ValueError):
            row["result"] = json.loads(result.read_text())
        if code == 0 and row.get("result", {}).get("done"):
            return row | {"ok": True, "log": notable(self.log)}
        said = row.get("result", {}).get("error") or logs.words(self.log)
        ended = f"no answer in {limit:.0f} s" if code is None else f"exit code {code}"
        row.setdefault("error", f"{ended}: {said}")
        return row | {"log": notable(self.log), "log_end": read_end(self.log)}

    def _instruct(self, instruction: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(instruction).encode() + b"\n")
        self.process.stdin.flush()

    def _wait(self, limit: float) -> int | None:
        """Return the exit code; None after the limit, when the process has written its stacks to its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=limit)
        self.show_stacks()
        return None

    def show_stacks(self) -> None:
        """Let a process that still runs write the stacks of its threads to its log."""
        self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=TRACE_S)

    def end(self) -> None:
        """Kill the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class Pool:
    """Processes that wait; another one is started if none is left."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self._place, self._environment = place, environment
        self._waiting: list[Process] = []
        self._started = 0

    def start(self, count: int) -> None:
        """Start processes, which import in parallel."""
        for _ in range(count):
            self._started += 1
            self._waiting.append(Process(self._started, self._place, self._environment))

    def settle(self, limit: float) -> list[dict[str, Any]]:
        """Wait until every import has ended, at most `limit` seconds; return the descriptions."""
        end = time.monotonic() + limit
        while time.monotonic() < end and not all(process.has_settled() for process in self._waiting):
            time.sleep(POLL_S)
        return [process.description() for process in self._waiting]

    def take(self, limit: float) -> Process:
        """Return a process that has imported. Raises RuntimeError with the reason if none has in time."""
        if not self._waiting:
            self.start(1)
        end = time.monotonic() + limit
        while time.monotonic() < end and not any(process.has_settled() for process in self._waiting):
            time.sleep(POLL_S)
        process = next((one for one in self._waiting if one.has_settled()), self._waiting[0])
        self._waiting.remove(process)
        if "error" in (said := process.description()):
            process.show_stacks()
            process.end()
            raise RuntimeError(f"{said['error']}; the end of its log: {read_end(process.log)}")
        return process

    def close(self) -> None:
        """Kill the processes that still wait."""
        while self._waiting:
            self._waiting.pop().end()


def read_end(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-LOG_END:]


def notable(log: Path, most: int = 40) -> list[str]:
    """Return the lines of a log that explain a fallback, without repetitions."""
    lines = [line[:400] for line in log.read_text(errors="replace").splitlines()]
    return list(dict.fromkeys(line for line in lines if any(word in line for word in NOTABLE)))[:most]
