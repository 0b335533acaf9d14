"""Process that starts servers for a host: it has imported all modules of a start, and forks one supervisor per server.

A start takes about a second of CPU time, and a server must learn of its supervisor's death. So neither happens
in the gateway, whose event loop must not block. A supervisor is a small process that plans, starts and supervises one
server as `coldstart serve` does, without the interpreter start and the imports (0.4 s) each time.

The gateway has one connection to the starter and one to each supervisor. The latter is a lease: its end, for any
reason, ends the server. Messages of a supervisor: {"process": pid} for itself and for each process of its start,
{"progress": members of StartProgress}, {"ready": document}, {"failed": members of Failure, "killed": bool, "final": bool},
{"code": exit code of the server}, {"exit": code}; to it: {"signal": n}. A template is supervised in the same way. It is
in the host's own directory, for servers of this host only, and ends with its lease.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from coldstart.contract.weights import PacedFetch
from coldstart.errors import NoBundleError
from coldstart.host.events import Failure
from coldstart.host.launches import WARN, Launch
from coldstart.host.live.log import describe_failure
from coldstart.host.tables import decode_arguments
from coldstart.system.ipc import json_lines
from coldstart.system.proc import exits, processes
from coldstart.system.proc.lifeline import die_with_parent, die_with_supervisor

if TYPE_CHECKING:
    from coldstart.contract.plan import LaunchPlan
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.server import Server
    from coldstart.launch.template_pool import Warm
    from coldstart.system.timeline import Timeline

# Time in seconds from the end of the lease until the server is killed.
GRACE_S = 10.0
# Interval in seconds at which a retired template is checked for remaining servers.
RETIRES_S = 0.5
Run = Callable[[Mapping[str, Any], json_lines.Channel], int]


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Order to start a server of `launch`, or a template of the level `template`.

    The server listens as vLLM's arguments in `listen` define, by default at its socket; `environment` is added to its
    environment. `pace` limits the rate at which weights are fetched. The directories `cache` and `templates`, and `offline`,
    are those of the `servers.Starter`, which sets them.
    """

    launch: Launch
    ready_timeout_s: float
    listen: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    pace: PacedFetch | None = None
    template: str | None = None
    cache: str = ""
    templates: str = ""
    offline: bool = False

    def encode(self) -> dict[str, Any]:
        """Return the message for the starter process."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> StartOrder:
        """Return the order of a message."""
        return msgspec.convert(message, cls, dec_hook=decode_arguments)


def main(descriptor: int) -> None:
    """Fork a supervisor for each message until the gateway's end of the connection closes."""
    die_with_supervisor()
    die_with_parent(signal.SIGKILL)  # also ends it while it is stopped
    import_start()
    serve_forever(json_lines.Channel(socket.socket(fileno=descriptor)), supervise)


def import_start() -> None:
    """Import what a start imports, so that each forked supervisor has it."""
    import coldstart.host.live.profiles
    import coldstart.launch.driver
    import coldstart.launch.preparation  # noqa: F401


def serve_forever(channel: json_lines.Channel, run: Run) -> None:
    """Fork one process for each message, which carries the lease and the log as file descriptors."""
    # Supervisors are not waited for: their leases report how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for message in channel.iterate_replies():
        lease, log = channel.take_descriptor(), channel.take_descriptor()
        if os.fork() == 0:
            channel.close()
            _become_supervisor(message, lease, log, run)
        os.close(lease)
        os.close(log)


def _become_supervisor(message: Mapping[str, Any], lease: int, log: int, run: Run) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        channel = json_lines.Channel(socket.socket(fileno=lease))
        Thread(target=_forward_signals, args=(channel,), name="lease", daemon=True).start()
        code = _answered(message, channel, run)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answered(message: Mapping[str, Any], channel: json_lines.Channel, run: Run) -> int:
    try:
        code = run(message, channel)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the gateway reports any error to the client
        killed = exits.is_killed(getattr(error, "code", None))
        # The log of a server has nothing to add to an error of vLLM that was recognized in it.
        flags = {"killed": killed, "final": getattr(error, "is_final", False)}
        failed = {"failed": asdict(_describe(error))}
        return _send(channel, failed | {name: True for name, is_set in flags.items() if is_set}, 1)
    return _send(channel, {"exit": code}, code)


def _send(channel: json_lines.Channel, message: Mapping[str, Any], code: int) -> int:
    with suppress(OSError):  # the gateway has ended
        channel.send(message)
    return code


def _describe(error: Exception) -> Failure:
    if (failure := describe_failure(error)) is not None:
        return failure
    import traceback

    traceback.print_exception(error)
    return Failure(f"{type(error).__name__}: {error}")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _forward_signals(channel: json_lines.Channel) -> None:
    """Forward the gateway's signals to this process's main thread; end when the lease ends."""
    with suppress(Exception):
        for message in channel.iterate_replies():
            os.kill(os.getpid(), int(message["signal"]))
    os.kill(os.getpid(), signal.SIGTERM)
    import time

    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def supervise(message: Mapping[str, Any], channel: json_lines.Channel) -> int:
    """Start the server that the message describes, report when it is ready, and supervise it; return its exit code.

    Raises the errors of planning and starting.
    """
    channel.send({"process": os.getpid()})
    order = StartOrder.parse(message)
    # Set the environment before any code looks for a device.
    os.environ.update(order.environment)
    if order.template is not None:
        return _template(order, order.template, channel)
    from coldstart.launch import driver
    from coldstart.system import secrets, start_progress

    request = replace(
        _request(order, (*order.listen, "--served-model-name", *order.launch.served_names)),
        observe=lambda pid: channel.send({"process": pid}),
        on_progress=lambda progress: channel.send({start_progress.KEY: asdict(progress)}),
    )
    servers: list[Server] = []

    def announce(server: Server, timeline: Timeline) -> None:
        servers.append(server)
        told = {
            "phases": timeline.sum_phases(),
            "spans": timeline.describe_spans(),
            "supervisor": os.getpid(),
        }
        channel.send({"ready": secrets.redact_document(server.document() | told)})

    code = driver.run(request, _plan(request), announce)
    return _send(channel, {"code": servers[0].running.process.wait()}, code)


def _request(order: StartOrder, listen: Sequence[str] = ()) -> ServeRequest:
    from coldstart.host.live import profiles
    from coldstart.launch.planning import ServeRequest
    from coldstart.system.paths import Cache

    launch = order.launch
    found = profiles.look_up_model(launch, Cache.at(Path(order.cache)), offline=order.offline)
    # Weights that are on this machine are read from it.
    fetched = launch.weights_from is not None and not found.model.weight_files
    return ServeRequest(
        found,
        listen,
        mode=launch.mode,
        without_bundle=launch.on_miss == WARN,
        ready_timeout=order.ready_timeout_s,
        templates=Path(order.templates),
        weights_from=launch.weights_from if fetched else None,
        weights_pace=order.pace if fetched else None,
    )


def _plan(request: ServeRequest) -> LaunchPlan:
    """Return the plan of a start. Raises the errors of `planning.plan`, with the hint for a model of a host."""
    from coldstart.launch import planning

    try:
        return planning.plan(request)
    except NoBundleError as error:
        if request.lookup.untrusted is not None:
            raise
        hint = f"{request.lookup.format_materialize()}, then retry"
        raise NoBundleError(error.lines, hint=hint) from error


def _template(order: StartOrder, level: str, channel: json_lines.Channel) -> int:
    """Supervise a template for this host's servers."""
    from coldstart.launch import preparation, template_pool

    request, root = _request(order), Path(order.templates)
    plan, model = _plan(request), request.lookup.model.name
    warm = preparation.start_template(level, plan, model, order.ready_timeout_s, root=root)
    return _guard(warm, channel, lambda: template_pool.stop(warm, force=True))


def _guard(warm: Warm, channel: json_lines.Channel, stop: Callable[[], None]) -> int:
    """Wait until a template ends or its lease does.

    After SIGUSR1, or when a start has hidden it because it did not answer, end it after its last forked process.
    """
    import select

    assert warm.pid is not None
    signal.signal(signal.SIGUSR1, lambda *_: warm.socket.unlink(missing_ok=True))
    pidfd = os.pidfd_open(warm.pid)
    try:
        channel.send({"ready": {"mode": f"template-{warm.level}", "pid": warm.pid}})
        while not select.select([pidfd], [], [], RETIRES_S)[0]:
            if not warm.socket.exists() and not processes.list_children(warm.pid):
                break
    finally:
        stop()
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
