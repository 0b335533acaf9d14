"""Template processes of this user, found by level and bundle key.

Each template has a directory `<runtime dir>/templates/<level>-<key>` with its socket, description and log. The socket
exists while the template is ready. In a directory without a socket, the template is still starting or has died. If the
caller passes a `root`, its templates are below that directory, and stop with the process that started them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO

from coldstart.artifacts import canonical, files
from coldstart.contract.environment import SUPERVISOR_PID
from coldstart.contract.plan import READY_FD_ENV, RUNTIME, SLEEP_LEVELS, LaunchPlan
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import server, server_process, template_environment
from coldstart.system import fingerprint, paths, timeline
from coldstart.system.proc import exits, processes

# Seconds after which a template that ignores SIGTERM is killed.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class RunningTemplate:
    """A template process and its directory.

    `pid` is None if the process has exited. `servers` are the PIDs of the processes that it has forked, or its own PID if
    it is an awake engine. `python` is its interpreter, whose vLLM all forked servers run. `birth` distinguishes the
    process from a later process with the same PID. If `coldstart up` started the template, `owner` contains the store ID
    and the model names. Otherwise it is empty.
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
        """Return whether the template is running and listening."""
        return self.pid is not None and self.socket.exists()


def find_ready(level: str, key: str) -> RunningTemplate | None:
    """Return the ready template for `key` at `level`, or None. A runtime template fits every key of its interpreter."""
    fits = (
        template
        for template in list_templates()
        if template.level == level and template.ready and template.python == sys.executable
    )
    return next((template for template in fits if level == RUNTIME or template.key == key), None)


def list_templates(root: Path | None = None) -> Iterator[RunningTemplate]:
    """Yield the templates under `root` (by default, all templates of this user), including those that have exited."""
    for directory in sorted(_root(root).iterdir()):
        try:
            about = canonical.read_json(directory / "about.json")
            template = RunningTemplate(**about | {"directory": directory, "owner": tuple(about["owner"])})
        except (OSError, ValueError, LookupError, TypeError):
            continue  # being written, or being removed
        pid = template.pid if template.pid and processes.is_alive(template.pid, template.birth) else None
        servers = _servers(pid)
        if template.level in SLEEP_LEVELS:
            servers = (pid,) if pid is not None and (directory / "serving").exists() else ()
        yield replace(template, pid=pid, servers=servers)


def find_incompatibility(template: RunningTemplate, plan: LaunchPlan) -> str | None:
    """Return the reason why this template cannot fork a server for `plan`, or None if it can.

    The installed files and the relevant environment variables must be the same as when the template was started.
    """
    reason = fingerprint.find_mismatch(template.directory, "template")
    return reason or template_environment.find_difference(
        template.environment, os.environ | plan.env, "template"
    )


def start_template(
    level: str,
    plan: LaunchPlan,
    model: str,
    timeout: float,
    root: Path | None = None,
    owner: Sequence[str] = (),
) -> RunningTemplate:
    """Start a template and wait until it listens. If the same template is already being started, wait for that start first.

    Raises:
        UsageError: A template of this level and key is already running.
        CommandFailedError: The template exits, or is not ready within `timeout` seconds.
    """
    directory = _choose_directory(f"{level}-{plan.key.removeprefix('sha256:')[:12]}", root)
    with files.hold_lock(_lock(directory)):
        if any(template.directory == directory and template.pid for template in list_templates(root)):
            raise UsageError(
                f"a template of level {level} for {model} is already running",
                hint="run `coldstart template status`",
            )
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir()
            process = _spawn_logged(level, plan, directory, timeout, bound=root is not None)
            return _describe(
                process,
                RunningTemplate(level, plan.key, directory, model, process.pid, owner=tuple(owner)),
                plan,
            )
        except BaseException:  # including a signal: otherwise an unlisted directory would remain
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _describe(
    process: subprocess.Popen[bytes], started: RunningTemplate, plan: LaunchPlan
) -> RunningTemplate:
    """Write the files by which `list_templates` finds the template, and return its description. If that fails, kill it."""
    read = template_environment.select_relevant(template_environment.build_environment(os.environ, plan))
    template = replace(
        started, python=sys.executable, environment=read, birth=processes.read_identity(process.pid)
    )
    try:
        fingerprint.write_fingerprint(
            process.pid, template.directory / fingerprint.MODULES, template.directory
        )
        (template.directory / "about.json").write_text(json.dumps(asdict(template), default=str))
    except BaseException:
        server.end(server_process.ChildServer(process), 0.0)
        raise
    return template


def remove_unfinished() -> None:
    """Remove the directories of templates whose start was killed."""
    for directory in _root().iterdir():
        if directory.is_dir() and (lock := files.try_lock(_lock(directory))) is not None:
            if not (directory / "about.json").exists():
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _choose_directory(name: str, root: Path | None) -> Path:
    """Return an unused directory for a new template.

    Templates of other interpreters keep their directories. Under a `root`, so do retired templates whose servers are still
    running.
    """
    names = (name if number == 0 else f"{name}-{number}" for number in count())
    alive = [template for template in list_templates(root) if template.pid]
    retained = {one.directory for one in alive if (root and not one.ready) or one.python != sys.executable}
    return next(path for one in names if (path := _root(root) / one) not in retained)


def _spawn_logged(
    level: str, plan: LaunchPlan, directory: Path, timeout: float, *, bound: bool
) -> subprocess.Popen[bytes]:
    try:
        with (directory / "log").open("wb") as log:
            return spawn_template(level, plan, directory / "socket", log, timeout, bound=bound)
    except CommandFailedError as error:
        if error.is_final:
            raise
        lines = [
            f"{error.message}; the end of its log:",
            *exits.read_log_tail(directory / "log").splitlines(),
        ]
        failed = server_process.ServerExitedError(lines, hint=error.hint)
        if isinstance(error, server_process.ServerExitedError):
            failed.cause, failed.code = error.cause, error.code
        raise failed from error


def spawn_template(
    level: str,
    plan: LaunchPlan,
    socket: Path,
    log: IO[bytes] | int,
    timeout: float,
    *,
    bound: bool = False,
    alone: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a template process that listens on `socket`, without secrets in its environment and arguments.

    Args:
        level: Level of the template.
        plan: Launch plan. Its secrets are removed, because the template also serves other starts.
        socket: Path of the socket to listen on.
        log: Destination of the template's output.
        timeout: Maximum time in seconds until the template is ready.
        bound: Whether the template stops when the calling thread exits.
        alone: Whether the template runs as a single-threaded child of the returned process, so that CRIU can dump it.

    Raises:
        CommandFailedError: The template exits, or is not ready in time.
    """
    plan = template_environment.redact_plan(plan)
    # A template that outlives its killed start would occupy the socket path of a later template.
    supervisor = {str(SUPERVISOR_PID): str(os.getpid())} if bound or level not in SLEEP_LEVELS else {}
    lasts = ["alone"] if alone else [] if bound else ["outlives"]
    process, reader = server_process.spawn_engine_module(
        "template",
        plan,
        lambda file, _: [str(socket), level, str(file), *lasts],
        log,
        env=template_environment.select_allowed(os.environ) | supervisor,
        variable=READY_FD_ENV,
        stdin=subprocess.DEVNULL,
        cwd="/",
    )
    child = server_process.ChildServer(process)
    try:
        server_process.await_readiness(child, reader, timeline.now(), timeout, subject="template")
    except BaseException:  # including Ctrl-C: otherwise an unlisted template would remain
        server.end(child, 0.0)
        raise
    return process


def stop_template(template: RunningTemplate, *, force: bool = False) -> None:
    """Stop a template and remove its directory.

    Raises CommandFailedError if servers forked from it are still running, unless `force` is set.
    """
    if template.servers and not force:
        raise CommandFailedError(
            f"cannot stop the template: its servers would end with it (PIDs {', '.join(map(str, template.servers))})",
            hint="stop the servers first, or run `coldstart template stop --force`",
        )
    if template.pid is not None:
        processes.terminate(template.pid, template.birth, _PATIENCE_S)
    shutil.rmtree(template.directory, ignore_errors=True)


def discard_template(template: RunningTemplate) -> None:
    """Prevent further starts from a template that does not respond. Kill it unless its running servers would exit with it."""
    template.socket.unlink(missing_ok=True)
    if template.pid is not None and not _servers(template.pid):
        processes.terminate(template.pid, template.birth, 0.0)


def _root(given: Path | None = None) -> Path:
    root = given or paths.runtime_dir() / "templates"
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def _servers(pid: int | None) -> tuple[int, ...]:
    """Return the servers that a template has forked. Its other child is multiprocessing's resource tracker (Python 3.14)."""
    try:
        children = processes.list_children(pid) if pid is not None else ()
    except OSError:
        return ()
    return tuple(child for child in children if b"resource_tracker" not in processes.read_command_line(child))
