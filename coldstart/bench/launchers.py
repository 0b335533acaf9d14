"""One launcher for each mode of the bench; templates and frozen runtimes are prepared here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.bench import run_order
from coldstart.errors import NO_BUNDLE, CommandFailedError, NoBundleError
from coldstart.system.proc import logs
from coldstart.system.snapshot import criu
from coldstart.validate.launch import Command, Launcher, ModeUnavailableError, RunFiles
from coldstart.validate.launchers import ServeLauncher, Subject, VllmLauncher, console, runtime_variables

PREPARE_S = 600.0


@dataclass
class TemplateLauncher:
    """`coldstart serve` from a template, which `prepare` starts and `close` stops."""

    subject: Subject
    mode: str
    runtime: Path
    tells_readiness: bool = True
    _started: bool = field(default=False, init=False)

    def prepare(self) -> None:
        """Start the template. Raises NoBundleError, or CommandFailedError where it does not start."""
        subject = self.subject
        _run_template(self.mode, self.runtime, "start", subject.model, *self._level(), *subject.passed_args)
        self._started = True

    def command(self, files: RunFiles) -> Command:
        return ServeLauncher(self.subject, self.mode, self.runtime).command(files)

    def close(self) -> None:
        """Stop the template. Raises CommandFailedError where it does not stop."""
        if self._started:
            self._started = False
            _run_template(self.mode, self.runtime, "stop", *self._level())

    def _level(self) -> list[str]:
        return ["--level", self.mode.removeprefix("template-"), *self.subject.common_args]


@dataclass(frozen=True)
class RuntimeLauncher:
    """`coldstart serve` from a frozen runtime, which `prepare` makes."""

    subject: Subject
    runtime: Path
    mode: str = run_order.RUNTIME_SNAPSHOT
    tells_readiness: bool = True

    def prepare(self) -> None:
        """Freeze the runtime. Raises ModeUnavailableError without CRIU, or CommandFailedError."""
        if (reason := criu.missing()) is not None:
            raise ModeUnavailableError(reason)
        _run_template(self.mode, self.runtime, "freeze", *self.subject.common_args)

    def command(self, files: RunFiles) -> Command:
        return ServeLauncher(self.subject, self.mode, self.runtime).command(files)

    def close(self) -> None:
        """Do nothing: a frozen runtime is no process."""


def launchers(subject: Subject, modes: Sequence[str], work: Path) -> list[Launcher]:
    """Create one launcher for each mode, with its state under `work`."""
    return [_launcher(subject, mode, work) for mode in modes]


def _launcher(subject: Subject, mode: str, work: Path) -> Launcher:
    if mode in run_order.BASELINES:
        return VllmLauncher(subject, work / "vllm" / "caches", mode == run_order.VLLM_WARM)
    runtime = work / "run"  # short: the path of a unix socket below it may have 107 bytes
    if mode in (run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE):
        return TemplateLauncher(subject, mode, runtime)
    if mode == run_order.RUNTIME_SNAPSHOT:
        return RuntimeLauncher(subject, runtime)
    return ServeLauncher(subject, mode, runtime)


def _run_template(mode: str, runtime: Path, action: str, *arguments: str) -> None:
    environment = {**os.environ, **runtime_variables(runtime)}
    # A file, not a pipe: the template that stays behind would keep a pipe open.
    log = runtime / f"{mode}-{action}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [*console(), "template", action, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PREPARE_S,
            check=False,
        )
    if done.returncode:
        raise _template_error(action, done.returncode, log)


def _template_error(action: str, status: int, log: Path) -> CommandFailedError | NoBundleError:
    message = f"coldstart template {action} ended with status {status}: {logs.end(log)}"
    return (
        NoBundleError(message)
        if status == NO_BUNDLE
        else CommandFailedError(message, hint="coldstart doctor")
    )
