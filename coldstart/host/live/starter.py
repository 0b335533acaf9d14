"""Starter process, which imports all modules that a start needs and forks one supervisor per server.

A start takes about a second of CPU time, and a server must exit with its supervisor. Neither is possible in the gateway,
whose event loop must not block. A supervisor is a small process that plans, starts and supervises one server as
`coldstart serve` does, but without starting an interpreter and importing modules (0.4 s).

The gateway has one connection to the starter and one to each supervisor. The latter is a lease: when it closes, for any
reason, the server is stopped. A supervisor sends {"process": pid} for itself and each process of its start, {"progress":
fields of StartProgress}, {"ready": document}, {"failed": fields of Failure, "killed": bool, "final": bool}, {"code": exit
code of the server} and {"exit": code}; it receives {"signal": n}. A template is supervised in the same way. It is in the
host's own directory, serves this host only, and is stopped when its lease closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import LimitedFetch
from coldstart.errors import NoBundleError
from coldstart.host.events import Failure
from coldstart.host.launches import WARN, Launch
from coldstart.host.live.log import describe_failure
from coldstart.host.tables import decode_arguments
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.peers import await_readable
from coldstart.system.proc import exits, processes
from coldstart.system.proc.lifeline import die_with_parent, die_with_supervisor

if TYPE_CHECKING:
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.server import Server
    from coldstart.launch.template_pool import RunningTemplate
    from coldstart.system.timeline import Timeline

# Seconds between the end of the lease and the forced stop of the server.
GRACE_S = 10.0
# Interval in seconds at which a retired template is checked for remaining servers.
RETIRES_S = 0.5
Run = Callable[[Mapping[str, Any], json_lines.Channel], int]


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Order to start a server for `launch`, or a template of the level `template`.

    `listen` contains vLLM's arguments for the listening address, which is a Unix socket by default. `environment`
    contains additional environment variables. `rate_limit` applies to the fetch of the weights. The server may use
    `gpu_bytes` bytes of its GPU; 0 sets no limit. `servers.ServerStarter` sets `cache`, `templates` and `offline`.
    """

    launch: Launch
    ready_timeout_s: float
    listen: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    rate_limit: LimitedFetch | None = None
    template: str | None = None
    gpu_bytes: int = 0
    cache: str = ""
    templates: str = ""
    offline: bool = False

    def encode(self) -> dict[str, Any]:
        """Encode the order as a message to the starter process."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> StartOrder:
        """Decode an order from a message."""
        return msgspec.convert(message, cls, dec_hook=decode_arguments)


def main(descriptor: int) -> None:
    """Run the starter process: fork a supervisor for each message until the gateway closes the socket `descriptor`."""
    die_with_supervisor()
    die_with_parent(signal.SIGKILL)  # SIGKILL also ends a process that is suspended
    import_start_modules()
    serve_forever(json_lines.Channel(socket.socket(fileno=descriptor)), supervise)


def import_start_modules() -> None:
    """Import the modules that a start needs, so that forked supervisors need not import them."""
    import coldstart.host.live.profiles
    import coldstart.launch.driver
    import coldstart.launch.preparation  # noqa: F401


def serve_forever(channel: json_lines.Channel, run: Run) -> None:
    """Fork a process that calls `run` for each message. A message carries two descriptors: the lease and the log."""
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
        # A final error was recognized in the server's log, so the log contains no better reason.
        is_final = getattr(error, "is_final", False)
        channel.try_send({"failed": asdict(_describe(error)), "killed": killed, "final": is_final})
        return 1
    channel.try_send({"exit": code})
    return code


def _describe(error: Exception) -> Failure:
    if (failure := describe_failure(error)) is not None:
        return failure
    traceback.print_exception(error)
    return Failure(f"{type(error).__name__}: {error}")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _forward_signals(channel: json_lines.Channel) -> None:
    """Forward the gateway's signals to the main thread, and stop the server when the lease ends."""
    with suppress(Exception):
        for message in channel.iterate_replies():
            os.kill(os.getpid(), int(message["signal"]))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def supervise(message: Mapping[str, Any], channel: json_lines.Channel) -> int:
    """Start the server that the message describes, report when it is ready, and supervise it. Return its exit code.

    Raises the errors of planning and starting.
    """
    channel.send({"process": os.getpid()})
    order = StartOrder.parse(message)
    # Set the environment before any code enumerates devices.
    os.environ.update(order.environment)
    if order.template is not None:
        return _template(order, order.template, channel)
    from coldstart.launch import driver
    from coldstart.system import secrets, start_progress

    request = replace(
        build_request(order, (*order.listen, "--served-model-name", *order.launch.served_names)),
        on_process_start=lambda pid: channel.send({"process": pid}),
        on_progress=lambda progress: channel.send({start_progress.KEY: asdict(progress)}),
    )
    servers: list[Server] = []

    def report_ready(server: Server, timeline: Timeline) -> None:
        servers.append(server)
        told = {
            "phases": timeline.sum_phases(),
            "spans": timeline.describe_spans(),
            "supervisor": os.getpid(),
        }
        channel.send({"ready": secrets.redact_document(server.document() | told)})

    code = driver.run_server(request, _plan(request), report_ready)
    channel.try_send({"code": servers[0].running.process.wait()})
    return code


def build_request(order: StartOrder, listen: Sequence[str] = ()) -> ServeRequest:
    """Return the request that executes an order, with the bundle that was found for it. Raises the errors of a lookup.

    `listen` contains vLLM's arguments for the listening address, and none for a template.
    """
    from coldstart.host.live import profiles
    from coldstart.launch.planning import ServeRequest
    from coldstart.system.paths import Cache

    launch = order.launch
    found = profiles.look_up_bundle(launch, Cache.at(Path(order.cache)), offline=order.offline)
    # Use local weights if they exist.
    fetched = launch.weights_from is not None and not found.model.weight_files
    return ServeRequest(
        found,
        (*listen, *profiles.limit_gpu_memory(found.vllm_args, order.gpu_bytes)),
        mode=launch.mode,
        without_bundle=launch.on_miss == WARN,
        ready_timeout=order.ready_timeout_s,
        templates=Path(order.templates),
        weights_from=launch.weights_from if fetched else None,
        weights_rate_limit=order.rate_limit if fetched else None,
        defer_capture=launch.defer_capture and order.template is None,
    )


def _plan(request: ServeRequest) -> LaunchPlan:
    """Return the launch plan. Raises the errors of `planning.plan`, with a hint for the host's operator."""
    from coldstart.launch import planning

    try:
        return planning.plan(request)
    except NoBundleError as error:
        if request.lookup.untrusted is not None:
            raise
        hint = f"run `{request.lookup.format_command('materialize')}`, then retry"
        raise NoBundleError(error.lines, hint=hint) from error


def _template(order: StartOrder, level: str, channel: json_lines.Channel) -> int:
    from coldstart.launch import preparation, template_pool

    request, root = build_request(order), Path(order.templates)
    plan, model = _plan(request), request.lookup.model.name
    template = preparation.start_template(level, plan, model, order.ready_timeout_s, root=root)
    return _guard(template, channel, lambda: template_pool.stop_template(template, force=True))


def _guard(template: RunningTemplate, channel: json_lines.Channel, stop: Callable[[], None]) -> int:
    """Wait until the template exits, and send its exit code, or until its lease ends. Then call `stop` and return 0.

    After SIGUSR1, or after a start has discarded an unresponsive template, stop it when its last forked process has exited.
    """
    assert template.pid is not None
    signal.signal(signal.SIGUSR1, lambda *_: template.socket.unlink(missing_ok=True))
    pidfd = os.pidfd_open(template.pid)
    try:
        channel.send({"ready": {"mode": f"template-{template.level}", "pid": template.pid}})
        while not await_readable(pidfd, timeout_s=RETIRES_S):
            if not template.socket.exists() and not processes.list_children(template.pid):
                break
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(template.pid, 0)[1])
            channel.send({"code": exits.convert_return_code(code)})
    finally:
        stop()
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
