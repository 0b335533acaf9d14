"""Launchers of vLLM's own server, with empty or warm caches, and of `coldstart serve` in one start mode.

The baselines have the settings of a careful user: caches below one root that all warm runs share, no usage statistics, and no
hub requests for a model on local disk. On the CPU the KV size is explicit, because the default would zero a large share of the
machine's memory at start.
They start through vLLM's Python entry point: its console script reads the metadata of a distribution named
"vllm" and fails if the CPU distribution is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import NO_BUNDLE, CommandFailedError, NoBundleError
from coldstart.launch import modes
from coldstart.launch.fetch import INSTANT_TENSOR
from coldstart.system import paths, runtime
from coldstart.system.proc import exits
from coldstart.system.snapshot import criu
from coldstart.system.timeline import EVENTS_VARIABLE
from coldstart.validate.launch import HOST, Command, Launcher, ModeUnavailableError, RunFiles
from coldstart.vllm.stock import ENTRY_POINT

VLLM_COLD, VLLM_WARM, FRESH = "vllm-cold", "vllm-warm", "fresh"
VLLM_FREE, VLLM_EAGER = "vllm-free", "vllm-eager"
PLAIN = (VLLM_COLD, VLLM_WARM, VLLM_FREE, VLLM_EAGER)
# What any user of vLLM can set for a shorter start, without another program.
FREE_VARIABLES = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_ENABLE_STARTUP_PLAN": "1"}
FULL_ONLY = '{"cudagraph_mode":"FULL_DECODE_ONLY"}'
CPU_KV_GIB = "1"
PREPARE_S = 600.0


@dataclass(frozen=True)
class Subject:
    """A model to start: its name as the user gave it, `target` as vLLM opens it, and vLLM's own arguments.

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

    @property
    def passed_args(self) -> list[str]:
        """Return `--` and vLLM's arguments. `--` alone makes a command start without those that the bundle records."""
        return ["--", *self.vllm_args]


@dataclass(frozen=True)
class VllmLauncher:
    """An ordinary vLLM server.

    A warm start uses `caches`, which all runs share. A cold start has empty caches; the first one fills `caches` if they do
    not exist yet, which saves one compilation. VLLM_FREE uses each option of vLLM that shortens a start without a cost later;
    VLLM_EAGER compiles and captures nothing. Both start warm.
    """

    subject: Subject
    caches: Path
    mode: str
    tells_readiness: bool = False

    def prepare(self) -> None:
        """Do nothing: a cold start, or the warm-up run, fills the caches."""

    def command(self, files: RunFiles) -> Command:
        root = (
            self.caches if self.mode != VLLM_COLD or not self.caches.exists() else files.directory / "caches"
        )
        argv = [sys.executable, "-m", ENTRY_POINT, "--model", self.subject.target]
        argv += ["--host", HOST, "--port", str(files.port), *self.subject.vllm_args]
        variables = {**baseline_variables(self.subject), **cache_variables(root)}
        if self.mode == VLLM_EAGER:
            argv += ["--enforce-eager"]
        elif self.mode == VLLM_FREE:
            argv += list_free_options(Arguments(self.subject.vllm_args))
            variables |= FREE_VARIABLES
        return Command(argv, {**variables, EVENTS_VARIABLE: str(files.events)})

    def close(self) -> None:
        """Do nothing: nothing was started."""


@dataclass
class ServeLauncher:
    """`coldstart serve` in one start mode; `runtime` is the directory of its sockets and templates."""

    subject: Subject
    mode: str
    runtime: Path
    tells_readiness: bool = True
    _started: bool = field(default=False, init=False)

    def prepare(self) -> None:
        """Start the template, or freeze the runtime, of a mode that needs one.

        Raises ModeUnavailableError if this machine lacks the mode, NoBundleError, or CommandFailedError.
        """
        (mode,) = (one for one in modes.LADDER if one.name == self.mode)
        if (reason := mode.unavailable()) is not None:
            raise ModeUnavailableError(f"{reason.reason} (hint: {reason.hint})")
        if self.mode == modes.RUNTIME_SNAPSHOT.name:
            if (lacking := criu.missing()) is not None:
                raise ModeUnavailableError(lacking)
            self._run_template("freeze", *self.subject.common_args)
        elif self._level:
            self._run_template("start", self.subject.model, *self._level, *self.subject.passed_args)
            self._started = True

    def command(self, files: RunFiles) -> Command:
        argv = [*console(), "serve", self.subject.model, "--mode", self.mode]
        argv += ["--revision", self.subject.revision] if self.subject.revision else []
        argv += [*self.subject.common_args, "--host", HOST, "--port", str(files.port)]
        argv += ["--ready-file", str(files.ready), *self.subject.passed_args]
        return Command(argv, {**runtime_variables(self.runtime), EVENTS_VARIABLE: str(files.events)})

    def close(self) -> None:
        """Stop the template that `prepare` started. Raises CommandFailedError if it does not stop."""
        if self._started:
            self._started = False
            self._run_template("stop", *self._level)

    @property
    def _level(self) -> list[str]:
        level = self.mode.removeprefix("template-")
        return [] if level == self.mode else ["--level", level, *self.subject.common_args]

    def _run_template(self, action: str, *arguments: str) -> None:
        environment = {**os.environ, **runtime_variables(self.runtime)}
        # Use a file, not a pipe: the template inherits the output and would keep a pipe open.
        log = self.runtime / f"{self.mode}-{action}.log"
        with log.open("wb") as output:
            status = subprocess.run(
                [*console(), "template", action, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PREPARE_S,
                check=False,
            ).returncode
        if status:
            message = f"coldstart template {action} ended with status {status}: {exits.read_end(log)}"
            if status == NO_BUNDLE:
                raise NoBundleError(message)
            raise CommandFailedError(message, hint="coldstart doctor")


def create_launchers(subject: Subject, names: Sequence[str], work: Path) -> list[Launcher]:
    """Create one launcher for each mode or baseline, with its state under `work`."""
    sockets = work / "run"  # short: the path of a unix socket is limited to 107 bytes
    return [
        VllmLauncher(subject, work / "vllm" / "caches", name)
        if name in PLAIN
        else ServeLauncher(subject, name, sockets)
        for name in names
    ]


def list_free_options(given: Arguments) -> list[str]:
    """Return vLLM's options for a shorter start on a GPU, without those that `given` sets; the CPU build has none."""
    if runtime.targets_cpu():
        return []
    graphs = [] if given.gives("compilation_config") else ["-cc", FULL_ONLY]
    has_loader = not given.gives("load_format") and find_spec(INSTANT_TENSOR)
    return graphs + (["--load-format", INSTANT_TENSOR] if has_loader else [])


def runtime_variables(directory: Path) -> dict[str, str]:
    """Create a runtime directory and return the variable that names it.

    With its own runtime directory, a start neither uses nor disturbs the user's template.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {"XDG_RUNTIME_DIR": str(directory)}


def console() -> list[str]:
    """Return the command that runs coldstart: this interpreter's installed script, or its module if there is no script."""
    script = Path(sys.executable).with_name("coldstart")
    return [str(script)] if script.exists() else [sys.executable, "-m", "coldstart.commands.cli"]


def baseline_variables(subject: Subject) -> dict[str, str]:
    """Return the variables that a careful user sets for plain vLLM, without those that are set already."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if subject.is_local:
        wanted |= {"HF_HUB_OFFLINE": "1"}
    if not any(argument.startswith("--kv-cache-memory") for argument in subject.vllm_args):
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_GIB}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cache_variables(root: Path) -> Mapping[str, str]:
    """Return variables that put each cache of a vLLM start under `root`; the hub's downloads stay in place."""
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
    # As set before XDG_CACHE_HOME is changed.
    cache = Path(environment.XDG_CACHE_HOME.read() or paths.expand("~/.cache"))
    hub = environment.HF_HOME.read() or cache / "huggingface"
    return {"HF_HOME": str(hub)} | {variable: str(path) for variable, path in directories.items()}
