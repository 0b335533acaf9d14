"""Launchers of plain vLLM, with cold or warm caches, and of `coldstart serve` in one start mode.

Plain vLLM gets the settings that a careful user would choose: one cache root shared by all warm runs, no usage
statistics, and no hub requests for a local model. On CPU, the KV cache size is explicit, because the default would zero a
large share of memory. The module runs vLLM's Python entry point, because its console script reads the metadata of a
distribution named "vllm" and fails if the CPU distribution is installed.
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
from coldstart.errors import ERROR, NO_BUNDLE, CommandFailedError, NoBundleError
from coldstart.launch import modes
from coldstart.launch.fetch import INSTANT_TENSOR
from coldstart.system import paths, runtime
from coldstart.system.proc import exits
from coldstart.validate.launch import HOST, Launcher, ModeUnavailableError, RunFiles
from coldstart.vllm.stock import ENTRY_POINT

VLLM_COLD, VLLM_WARM, FRESH = "vllm-cold", "vllm-warm", "fresh"
VLLM_FREE, VLLM_EAGER = "vllm-free", "vllm-eager"
VLLM_MODES = (VLLM_COLD, VLLM_WARM, VLLM_FREE, VLLM_EAGER)
# Environment variables of vLLM that shorten a start and that any user can set.
FREE_VARIABLES = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_ENABLE_STARTUP_PLAN": "1"}
FULL_DECODE_ONLY = '{"cudagraph_mode":"FULL_DECODE_ONLY"}'
CPU_KV_GIB = "1"
PREPARE_TIMEOUT_S = 660.0  # longer than that of `coldstart template start`, whose error says more


@dataclass(frozen=True)
class ModelUnderTest:
    """Model to start: `model` as the user wrote it, `vllm_model` as vLLM opens it, and the vLLM arguments.

    `common_args` are options that every coldstart command accepts.
    """

    model: str
    vllm_model: str
    vllm_args: tuple[str, ...] = ()
    common_args: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def separated_vllm_args(self) -> list[str]:
        """Return `--` and the vLLM arguments. A `--` without arguments disables those that the bundle records."""
        return ["--", *self.vllm_args]


@dataclass
class VllmLauncher(Launcher):
    """Launcher of plain vLLM. Warm starts share `caches`.

    A cold start has empty caches; the first cold start creates and fills `caches`, which saves a compilation. VLLM_FREE
    uses every vLLM option that shortens a start at no later cost. VLLM_EAGER neither compiles nor captures CUDA graphs.
    Both start warm.
    """

    subject: ModelUnderTest
    caches: Path
    mode: str
    writes_ready_file: bool = False

    def build_command(self, files: RunFiles) -> tuple[Sequence[str], Mapping[str, str]]:
        root = (
            self.caches if self.mode != VLLM_COLD or not self.caches.exists() else files.directory / "caches"
        )
        argv = [sys.executable, "-m", ENTRY_POINT, "--model", self.subject.vllm_model]
        argv += ["--host", HOST, "--port", str(files.port), *self.subject.vllm_args]
        variables = {**build_baseline_environment(self.subject), **build_cache_environment(root)}
        if self.mode == VLLM_EAGER:
            argv += ["--enforce-eager"]
        elif self.mode == VLLM_FREE:
            argv += build_startup_options(Arguments(self.subject.vllm_args))
            variables |= FREE_VARIABLES
        return argv, {**variables, environment.TIMELINE_EVENTS: str(files.events_file)}


@dataclass
class ServeLauncher(Launcher):
    """Launcher of `coldstart serve` in one start mode. `runtime` is the directory of its sockets and templates."""

    subject: ModelUnderTest
    mode: str
    runtime: Path
    writes_ready_file: bool = True
    _level_args: list[str] = field(default_factory=list, init=False)

    def prepare(self) -> None:
        """Start the template or create the runtime snapshot that the mode needs.

        Raises ModeUnavailableError if this machine cannot run the mode, NoBundleError, or CommandFailedError.
        """
        (mode,) = (one for one in modes.LADDER if one.name == self.mode)
        if (reason := mode.find_unusable_reason() or modes.find_criu_limit(mode)) is not None:
            raise ModeUnavailableError(f"{reason.reason} (hint: {reason.hint})")
        match mode.preparation:
            case ("start", "MODEL", *level):
                level_args = [*level, *self.subject.common_args]
                self._run_template(
                    "start", self.subject.model, *level_args, *self.subject.separated_vllm_args
                )
                self._level_args = level_args
            case (action, *rest):
                self._run_template(action, *rest, *self.subject.common_args)

    def build_command(self, files: RunFiles) -> tuple[Sequence[str], Mapping[str, str]]:
        argv = [*find_coldstart_command(), "serve", self.subject.model, "--mode", self.mode]
        argv += ["--revision", self.subject.revision] if self.subject.revision else []
        argv += [*self.subject.common_args, "--host", HOST, "--port", str(files.port)]
        argv += ["--ready-file", str(files.ready_file), *self.subject.separated_vllm_args]
        variables = create_runtime_environment(self.runtime)
        return argv, {**variables, environment.TIMELINE_EVENTS: str(files.events_file)}

    def close(self) -> None:
        """Stop the template that `prepare` started. Raises CommandFailedError if it does not stop."""
        if level_args := self._level_args:
            self._level_args = []
            self._run_template("stop", *level_args)

    def _run_template(self, action: str, *arguments: str) -> None:
        environment = {**os.environ, **create_runtime_environment(self.runtime)}
        # Use a file and not a pipe, which the template would inherit and keep open.
        log = self.runtime / f"{self.mode}-{action}.log"
        try:
            with log.open("wb") as output:
                status = subprocess.run(
                    [*find_coldstart_command(), "template", action, *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=PREPARE_TIMEOUT_S,
                    check=False,
                ).returncode
            outcome = f"exited with code {status}"
        except subprocess.TimeoutExpired:
            status, outcome = ERROR, f"did not end within {PREPARE_TIMEOUT_S:g} s and was killed"
        if status:
            message = f"coldstart template {action} {outcome}: {exits.read_log_tail(log)}"
            if status == NO_BUNDLE:
                raise NoBundleError(message)
            raise CommandFailedError(message, hint="run `coldstart doctor`")


def create_launchers(subject: ModelUnderTest, names: Sequence[str], work: Path) -> list[Launcher]:
    """Create a launcher for each start mode or vLLM mode in `names`. The launchers keep their state under `work`."""
    sockets = work / "run"  # short, because the path of a Unix socket is limited to 107 bytes
    return [
        VllmLauncher(subject, work / "vllm" / "caches", name)
        if name in VLLM_MODES
        else ServeLauncher(subject, name, sockets)
        for name in names
    ]


def build_startup_options(arguments: Arguments) -> list[str]:
    """Return the vLLM options that shorten a start on a GPU and that `arguments` does not set, or none for the CPU build."""
    if runtime.targets_cpu():
        return []
    graphs = [] if arguments.contains_flag("compilation_config") else ["-cc", FULL_DECODE_ONLY]
    has_loader = not arguments.contains_flag("load_format") and find_spec(INSTANT_TENSOR)
    return graphs + (["--load-format", INSTANT_TENSOR] if has_loader else [])


def create_runtime_environment(directory: Path) -> dict[str, str]:
    """Create a runtime directory, and return the environment variable that selects it.

    With its own runtime directory, a start does not interfere with the user's templates.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {"XDG_RUNTIME_DIR": str(directory)}


def find_coldstart_command() -> list[str]:
    """Return the command that runs coldstart: the installed script, or the module if there is no script."""
    script = Path(sys.executable).with_name("coldstart")
    return [str(script)] if script.exists() else [sys.executable, "-m", "coldstart.commands.cli"]


def build_baseline_environment(subject: ModelUnderTest) -> dict[str, str]:
    """Return the environment variables that a careful user would set for plain vLLM, except those that are already set."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(subject.vllm_model).is_dir():
        variables |= {"HF_HUB_OFFLINE": "1"}
    if not any(argument.startswith("--kv-cache-memory") for argument in subject.vllm_args):
        variables |= {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_GIB}
    return {name: value for name, value in variables.items() if name not in os.environ}


def build_cache_environment(root: Path) -> Mapping[str, str]:
    """Return environment variables that move vLLM's caches under `root`, except for downloaded models."""
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
    # Resolve the hub cache with the current XDG_CACHE_HOME, before the override below.
    cache = Path(environment.XDG_CACHE_HOME.read() or paths.expand_user("~/.cache"))
    hub = environment.HF_HOME.read() or cache / "huggingface"
    return {"HF_HOME": str(hub)} | {variable: str(path) for variable, path in directories.items()}
