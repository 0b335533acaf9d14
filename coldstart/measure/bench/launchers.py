"""The real servers: vLLM's own start (empty or warm caches), and coldstart's start modes.

The baselines get what a careful user would give them: caches that live on one root and are reused
(`vllm-warm`), no usage statistics sent at start, no hub round trips for a model that is on disk, and on the
CPU an explicit KV size, for the default would zero a large share of the machine's memory at start.
They start through vLLM's Python entry point: its console script asks for the metadata of a distribution named
"vllm" and fails where the CPU distribution is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstart.contract import environment
from coldstart.errors import NO_BUNDLE, CommandFailed, NoBundle
from coldstart.machine import criu, logs
from coldstart.machine.timeline import EVENTS_VARIABLE
from coldstart.measure.bench import run_order
from coldstart.measure.bench.launch import HOST, Command, Launcher, ModeUnavailable, RunFiles
from coldstart.vllm.stock import ENTRY_POINT

CPU_KV_GIB = "1"


@dataclass(frozen=True)
class Subject:
    """What is started: the model as the user named it, as vLLM can open it, and vLLM's own arguments.

    `common_args` are options that every coldstart command takes.
    """

    model: str
    target: str
    vllm_args: tuple[str, ...] = ()
    common_args: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.target).is_dir()


@dataclass(frozen=True)
class VllmLauncher:
    """An ordinary vLLM server. `caches` is kept between runs when `warm`, else every run has an empty one.

    The first cold start fills those that the warm ones then have, if nobody did before: one compilation less.
    """

    subject: Subject
    caches: Path
    warm: bool
    tells_readiness: bool = False

    @property
    def mode(self) -> str:
        return run_order.VLLM_WARM if self.warm else run_order.VLLM_COLD

    def prepare(self) -> None:
        """Nothing: a cold start, or the plan's warm-up run, fills the caches."""

    def command(self, files: RunFiles) -> Command:
        root = self.caches if self.warm or not self.caches.exists() else files.directory / "caches"
        argv = [sys.executable, "-m", ENTRY_POINT, "--model", self.subject.target]
        argv += ["--host", HOST, "--port", str(files.port), *self.subject.vllm_args]
        return Command(argv, {**careful(self.subject), **cache_variables(root)})

    def close(self) -> None:
        """Nothing was started."""


@dataclass
class ColdstartLauncher:
    """`coldstart serve` in one start mode; a template or the frozen runtime that it needs is made in `prepare`."""

    subject: Subject
    mode: str
    runtime: Path
    tells_readiness: bool = True
    prepare_timeout_s: float = 600.0
    _started: bool = False

    def prepare(self) -> None:
        """Start the template, or freeze the runtime.

        Raises ModeUnavailable without CRIU, NoBundle, or CommandFailed where it does not come up.
        """
        if self.mode == run_order.RUNTIME_SNAPSHOT:
            if (reason := criu.missing()) is not None:
                raise ModeUnavailable(reason)
            self._template("freeze", *self.subject.common_args)
        if self._is_template:
            self._template("start", self.subject.model, *self._level(), *self._passed())
            self._started = True

    def command(self, files: RunFiles) -> Command:
        revision = ["--revision", self.subject.revision] if self.subject.revision else []
        argv = [
            *console(),
            "serve",
            self.subject.model,
            "--mode",
            self.mode,
            *revision,
            *self.subject.common_args,
        ]
        argv += ["--host", HOST, "--port", str(files.port), "--ready-file", str(files.ready), *self._passed()]
        return Command(argv, {**self._environment(), EVENTS_VARIABLE: str(files.events)})

    def close(self) -> None:
        """Stop the template. Raises CommandFailed when it does not stop."""
        if self._started:
            self._started = False
            self._template("stop", *self._level())

    @property
    def _is_template(self) -> bool:
        return self.mode in (run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE)

    def _template(self, action: str, *arguments: str) -> None:
        environment = self._environment()
        # A file, not a pipe: the template that stays behind would keep a pipe open.
        log = self.runtime / f"{self.mode}-{action}.log"
        with log.open("wb") as output:
            done = subprocess.run(
                [*console(), "template", action, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=self.prepare_timeout_s,
                check=False,
            )
        if done.returncode:
            message = f"coldstart template {action} ended with status {done.returncode}: {logs.end(log)}"
            raise (
                NoBundle(message)
                if done.returncode == NO_BUNDLE
                else CommandFailed(message, mend="coldstart doctor")
            )

    def _level(self) -> list[str]:
        return ["--level", self.mode.removeprefix("template-"), *self.subject.common_args]

    def _passed(self) -> list[str]:
        return ["--", *self.subject.vllm_args] if self.subject.vllm_args else []

    def _environment(self) -> dict[str, str]:
        # A runtime directory of its own: the user's own template is neither used nor disturbed.
        self.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {"XDG_RUNTIME_DIR": str(self.runtime)}


def launchers(subject: Subject, modes: Sequence[str], work: Path) -> list[Launcher]:
    """One launcher per mode, keeping its state under `work`."""
    return [_launcher(subject, mode, work) for mode in modes]


def _launcher(subject: Subject, mode: str, work: Path) -> Launcher:
    if mode in run_order.BASELINES:
        return VllmLauncher(subject, work / "vllm" / "caches", mode == run_order.VLLM_WARM)
    # One short directory: the path of a unix socket below it may have 107 bytes.
    return ColdstartLauncher(subject, mode, work / "run")


def console() -> list[str]:
    """The installed `coldstart` script of this interpreter, else the module."""
    script = Path(sys.executable).with_name("coldstart")
    return [str(script)] if script.exists() else [sys.executable, "-m", "coldstart.commands.cli"]


def careful(subject: Subject) -> dict[str, str]:
    """The variables a careful user sets for plain vLLM; those set already are left alone."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if subject.is_local:
        wanted |= {"HF_HUB_OFFLINE": "1"}
    if not any(argument.startswith("--kv-cache-memory") for argument in subject.vllm_args):
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_GIB}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cache_variables(root: Path) -> Mapping[str, str]:
    """Every cache that a start of vLLM fills, under `root`; the hub's downloads stay where they are."""
    names = {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "xdg",
        "TMPDIR": "tmp",
    }
    directories = {variable: root / name for variable, name in names.items()}
    for directory in directories.values():
        directory.mkdir(parents=True, exist_ok=True)
    return {"HF_HOME": str(hub_home())} | {variable: str(path) for variable, path in directories.items()}


def hub_home() -> Path:
    """Where the hub's downloads are now, found before XDG_CACHE_HOME is moved."""
    cache = Path(environment.XDG_CACHE_HOME.read() or Path.home() / ".cache")
    return Path(environment.HF_HOME.read() or cache / "huggingface")
