"""Running template processes of this user: started for a model and its arguments, found by level and key.

A template has a directory `<runtime dir>/templates/<level>-<key>` with its socket, plan and log. The socket exists while the
template is ready. A directory without a listening socket belongs to a template that is still starting or has died.

A caller that passes another `root` has its own templates there, which end with the process that started them.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO

from coldstart.artifacts import canonical, files
from coldstart.contract.plan import RUNTIME, SLEEP_LEVELS, LaunchPlan
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import server_process, template_environment
from coldstart.system import fingerprint, paths
from coldstart.system.proc import exits, processes
from coldstart.system.proc.lifeline import SUPERVISOR_ENV
from coldstart.vllm.engine import rejection

# Seconds until a template that ignores SIGTERM is killed.
_PATIENCE_S = 10.0


class TemplateExitedError(CommandFailedError):
    """The template exited before it was ready, with `code` (128 + n after signal n). `cause` is the error in its log."""

    code: int | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Warm:
    """A template. `pid` is None after its process exited. `servers` are the processes it has forked, or itself when awake.

    `python` is its interpreter: a server forked from it runs the vLLM of that interpreter. `birth` distinguishes its process
    from a later one with its PID. `owner` are the store and the names of the model for which `up` started it, if `up` did.
    """

    level: str
    key: str
    directory: Path
    model: str
    pid: int | None
    servers: tuple[int, ...] = ()
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    birth: str | None = None
    owner: tuple[str, ...] = ()

    @property
    def socket(self) -> Path:
        """Return the path on which the template listens."""
        return self.directory / "socket"

    @property
    def ready(self) -> bool:
        """Return whether the template listens."""
        return self.pid is not None and self.socket.exists()


def find(level: str, key: str, root: Path | None = None) -> Warm | None:
    """Return the ready template for `key` at `level`, or None. A runtime template serves every key of its interpreter."""
    fits = (
        warm for warm in listed(root) if warm.level == level and warm.ready and warm.python == sys.executable
    )
    return next((warm for warm in fits if level == RUNTIME or warm.key == key), None)


def listed(root: Path | None = None) -> Iterator[Warm]:
    """Yield the templates below `root`, by default those of this user, that were started and not stopped."""
    for directory in sorted(_root(root).iterdir()):
        try:
            about = canonical.read_json(directory / "about.json")
            warm = Warm(**about | {"directory": directory, "owner": tuple(about["owner"])})
        except (OSError, ValueError, LookupError, TypeError):
            continue  # being written, or being removed
        pid = warm.pid if warm.pid and processes.is_alive(warm.pid, warm.birth) else None
        servers = _awake(pid, directory) if warm.level in SLEEP_LEVELS else _servers(pid)
        yield replace(warm, pid=pid, servers=servers)


def obstacle(warm: Warm, plan: LaunchPlan) -> str | None:
    """Return why this template cannot fork a server for `plan`, or None.

    The installed files and the relevant environment variables must be those that the template was started with.
    """
    reason = fingerprint.find_mismatch(warm.directory, "template")
    return reason or template_environment.difference(warm.environment, os.environ | plan.env, "template")


def start(
    level: str,
    plan: LaunchPlan,
    model: str,
    timeout: float,
    root: Path | None = None,
    owner: Sequence[str] = (),
) -> Warm:
    """Start a template and wait until it listens. A start of the same one by another process ends before.

    Raises:
        UsageError: A template of this level and key already runs.
        CommandFailedError: The template exits, or is not ready in `timeout` seconds.
    """
    directory = _choose_directory(f"{level}-{plan.key.removeprefix('sha256:')[:12]}", root)
    with files.hold_lock(_lock(directory)):
        if any(warm.directory == directory and warm.pid for warm in listed(root)):
            raise UsageError(
                f"a template of level {level} for {model} already runs", hint="coldstart template status"
            )
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir()
            process = _spawn_logged(level, plan, directory, timeout, bound=root is not None)
            return _describe(
                process, Warm(level, plan.key, directory, model, process.pid, owner=tuple(owner)), plan
            )
        except BaseException:  # a signal included: an unlisted directory would remain
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _describe(process: subprocess.Popen[bytes], started: Warm, plan: LaunchPlan) -> Warm:
    """Write the files by which `listed` finds the ready template, and return its description. On an error end the template."""
    read = template_environment.select_relevant(template_environment.spawned(os.environ, plan))
    warm = replace(
        started, python=sys.executable, environment=read, birth=processes.read_identity(process.pid)
    )
    try:
        fingerprint.write_fingerprint(process.pid, warm.directory / fingerprint.MODULES, warm.directory)
        (warm.directory / "about.json").write_text(json.dumps(asdict(warm), default=str))
    except BaseException:
        _kill(process)
        raise
    return warm


def sweep() -> None:
    """Remove what a killed process left of a template that it was starting."""
    for directory in _root().iterdir():
        if directory.is_dir() and (lock := files.try_lock(_lock(directory))) is not None:
            if not (directory / "about.json").exists():
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _choose_directory(name: str, root: Path | None) -> Path:
    """Return the directory of a new template. One of another installation of this user retains its own.

    Below a `root`, a hidden one retains its own until its servers end.
    """
    names = (name if number == 0 else f"{name}-{number}" for number in count())
    alive = [warm for warm in listed(root) if warm.pid]
    retained = {one.directory for one in alive if (root and not one.ready) or one.python != sys.executable}
    return next(path for one in names if (path := _root(root) / one) not in retained)


def _spawn_logged(
    level: str, plan: LaunchPlan, directory: Path, timeout: float, *, bound: bool
) -> subprocess.Popen[bytes]:
    try:
        with (directory / "log").open("wb") as log:
            return spawn(level, plan, directory / "socket", log, timeout, bound=bound)
    except CommandFailedError as error:
        if found := rejection.find((directory / "log").read_text(errors="replace")):
            raise found.build_error(TemplateExitedError) from error
        lines = [
            f"{error.message}; the end of its log:",
            *exits.read_log_tail(directory / "log").splitlines(),
        ]
        failed = TemplateExitedError(lines, hint=error.hint)
        failed.cause = exits.find_last_error(directory / "log")
        failed.code = error.code if isinstance(error, TemplateExitedError) else None
        raise failed from error


def spawn(
    level: str,
    plan: LaunchPlan,
    socket: Path,
    log: IO[bytes] | int,
    timeout: float,
    *,
    bound: bool = False,
    alone: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a template process that listens at `socket`, without any secret in its variables and arguments.

    Args:
        level: Level of the template.
        plan: Launch plan; secrets are removed from it, because the template is forked for other starts, or frozen.
        socket: Path to listen on.
        log: Destination of its output.
        timeout: Seconds until the template must be ready.
        bound: End the template with the thread that calls this.
        alone: Continue as a single-threaded child of the returned process, so that CRIU can freeze it.

    Raises:
        CommandFailedError: The template exits, or is not ready in time.
    """
    plan = template_environment.redact_plan(plan)
    # A template that outlived its killed start would listen in the place of a later one.
    supervisor = {str(SUPERVISOR_ENV): str(os.getpid())} if bound or level not in SLEEP_LEVELS else {}
    lasts = ["alone"] if alone else [] if bound else ["outlives"]
    process, reader = server_process.spawn(
        "template",
        plan,
        lambda file, writer: [str(socket), level, str(file), str(writer), *lasts],
        log,
        env=template_environment.select_allowed(os.environ) | supervisor,
        stdin=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        if not select.select([reader], [], [], timeout)[0]:
            raise CommandFailedError(
                f"the template was not ready within {timeout:g} s",
                hint="allow more time with --ready-timeout SECONDS",
            )
        if os.read(reader, 1) == b"":
            raise TemplateExitedError("the template exited before it was ready")
    except BaseException as error:  # Ctrl-C included: otherwise an unlisted template would remain
        code = _kill(process)
        if isinstance(error, TemplateExitedError):
            error.code = code if code >= 0 else 128 - code
        raise
    finally:
        os.close(reader)
    return process


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill a template and what it has started, such as a compiler, and return its exit code."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # not yet reaped, so its PID is not reused
    return process.wait()


def stop(warm: Warm, *, force: bool = False) -> None:
    """End a template and remove its directory. Raises CommandFailedError while its servers run, unless `force`."""
    if warm.servers and not force:
        raise CommandFailedError(
            f"{len(warm.servers)} server(s) forked from this template still run and would end with the template",
            hint="stop the servers first, or run coldstart template stop --force",
        )
    if warm.pid is not None:
        processes.terminate(warm.pid, warm.birth, _PATIENCE_S)
    shutil.rmtree(warm.directory, ignore_errors=True)


def discard(warm: Warm) -> None:
    """Let no further start use a template that does not answer; kill it if no server would end with it."""
    warm.socket.unlink(missing_ok=True)
    if warm.pid is not None and not _servers(warm.pid):
        processes.terminate(warm.pid, warm.birth, 0.0)


def _root(given: Path | None = None) -> Path:
    root = given or paths.runtime_dir() / "templates"
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def _awake(pid: int | None, directory: Path) -> tuple[int, ...]:
    return (pid,) if pid is not None and (directory / "serving").exists() else ()


def _servers(pid: int | None) -> tuple[int, ...]:
    try:
        return processes.list_children(pid) if pid is not None else ()
    except OSError:
        return ()
