"""Process that forks servers, with the runtime imported, or with the engine's worker built as well.

The template runs one Python thread and no OpenMP team, so that a fork is complete. Threads that torch.distributed's gloo
creates for a group of one do not survive the fork and are not needed again; a larger group is refused. A child
adopts the built worker if vLLM's configuration is the same, and builds its own otherwise.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import ENGINE, READY_FD_ENV, SLEEP_LEVELS, LaunchPlan
from coldstart.system import fingerprint, runtime, timeline
from coldstart.system.ipc import addresses, json_lines
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import Listener, PeerError
from coldstart.system.proc import own_process
from coldstart.system.proc.lifeline import SUPERVISOR_ENV, die_with_parent, die_with_supervisor
from coldstart.vllm import compat
from coldstart.vllm.engine import adoption, application, server, stepdowns
from coldstart.vllm.engine.readiness import refuse


def build(plan: LaunchPlan, level: str) -> stepdowns.Fallbacks:
    """Import the runtime and, at level `engine`, build the worker: load the weights, restore the compiled forward.

    Returns:
        The fallbacks that the servers do not find out themselves.

    Raises:
        RuntimeError: This vLLM does not support it, another Python thread runs, or level `engine` was requested on a GPU or for
            more than one rank. Such a process must not be forked.
    """
    if level == ENGINE and not runtime.targets_cpu():
        raise RuntimeError("a built GPU engine cannot be forked: CUDA does not survive a fork")
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # the monitor would be a thread
    plan.install()
    if reason := compat.check("start", _import_everything):
        raise RuntimeError(f"cannot build a template: {reason}")
    args, _ = server.parse_args(plan.vllm_args)
    fallbacks: stepdowns.Fallbacks = []
    lack = (compat.check("template") or compat.check("worker")) if level == ENGINE else None
    arguments = adoption.describe_worker(args, plan) if level == ENGINE and not lack else {}
    config = server.configure(args)
    application.warm(args, config)
    compat.check("ahead", replace_kernels)
    if reason := compat.check("start", partial(server.import_gpu_engine, config)):
        fallbacks.append(Fallback("template", f"{reason} Each server imports its engine."))
    if is_cuda_initialized():
        raise RuntimeError(
            "CUDA was initialized by an import: a fork of this process could not use the device"
        )
    if lack:
        fallbacks.append(Fallback("template", f"{lack} Each server builds its own worker."))
    elif level == ENGINE:
        from vllm.tokenizers import cached_tokenizer_from_config

        cached_tokenizer_from_config(config.model_config)
        prebuild_worker(config, arguments)
        # gloo listens for the other members of a group of one. A thawed template would need the same ports again.
        addresses.close_listening_sockets()
    if threading.active_count() > 1:
        raise RuntimeError(f"threads alive before the fork: {[t.name for t in threading.enumerate()]}")
    gc.collect()
    own_process.trim_heap()
    gc.freeze()
    return fallbacks


def replace_kernels() -> None:
    """Let a CPU worker's search for Triton kernels to replace run once, before the fork.

    It takes a third of a second, and a forked worker copies the memory that it reads. A module that a child imports later gets
    the replacement from the module that defines the kernel.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.compilation.backends
    import vllm.model_executor.layers.quantization.online.base  # noqa: F401

    current_platform.register_triton_kernel_overrides()
    platform = current_platform
    # Set on this process's object, so that its children skip the search.
    platform.register_triton_kernel_overrides = lambda: None


def is_cuda_initialized() -> bool:
    """Return whether this process has a CUDA context, with which no fork can use the device."""
    import torch

    return bool(torch.cuda.is_initialized())


def _import_everything() -> None:
    server.import_runtime()
    server.import_engine()


def prebuild_worker(config: Any, arguments: dict[str, str]) -> None:
    """Build a worker for `config`, made of `arguments`, and store it for the executor of a forked engine to adopt."""
    from coldstart.vllm.engine import executor

    if config.parallel_config.world_size > 1:
        raise RuntimeError("an engine template needs one rank: gloo's threads do not survive a fork")
    executor.prebuild(config, arguments)


_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class Template:
    """Accept loop that forks one server per request and reports its exit code.

    Everything runs on one thread; a self-pipe turns SIGCHLD into an event.
    """

    def __init__(self, listener: Listener, fallbacks: stepdowns.Fallbacks | None = None) -> None:
        self.listener, self.fallbacks = listener, fallbacks or []
        self.selector = selectors.DefaultSelector()
        self.servers: dict[int, Channel | None] = {}
        self.stopping = False

    def run(self) -> None:
        """Fork servers on request until SIGTERM or SIGINT. A forked server exits when its client's lease ends."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer)
        for number in _HANDLED:
            signal.signal(number, self._on_signal)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(reader, selectors.EVENT_READ)
        while not self.stopping:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj == reader:
                    os.read(reader, 512)
                    self._reap()
                else:
                    self._end_lease(key.data)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stopping = self.stopping or number != signal.SIGCHLD

    def _accept(self) -> None:
        accepted = self.listener.accept()
        if accepted is None:
            return
        connection = Channel(accepted)
        try:
            connection.receive_request()
        except PeerError as error:
            self._refuse(connection, str(error))
            return
        received = timeline.now()
        # Block signals until the child has removed our handlers, or the child would handle a signal as the template.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            self._refuse(connection, str(error))
            return
        if pid == 0:
            self._become_server(received, connection)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        connection.close_descriptors()
        self.servers[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        _tell(connection, {"pid": pid})

    def _refuse(self, connection: Channel, reason: str) -> None:
        _tell(connection, {"error": reason})
        connection.close()

    def _become_server(self, received: float, connection: Channel) -> None:
        """Drop the template's state in the child, take over the client's streams and environment, serve, and never return.

        Only the child reads the request: it contains the secrets of the start, and the template outlives the start.
        """
        code = 1
        try:
            request = json_lines.read_document(connection.take_descriptor())
            descriptors = [connection.take_descriptor() for _ in range(5)]
            self._shed(connection)
            die_with_parent()
            if not os.read(descriptors[4], 1):
                return  # the client found that this template does not fit, or has disconnected
            os.close(descriptors[4])
            for target, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, target)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            server.renew_environment()
            tempfile.tempdir = None
            os.environ[READY_FD_ENV] = str(descriptors[3])
            # A thawed process may be in a time namespace whose CLOCK_MONOTONIC differs from the client's.
            os.environ[timeline.OFFSET_VARIABLE] = str(request["now"] - received)
            own_process.reseed_random_state()
            own_process.request_amx_tiles()  # a thawed template has lost the permission
            timeline.emit_span("fork the server", received, timeline.now(), "server")
            code = self._serve(request["plan"])
        except BaseException as error:  # noqa: BLE001 - the last frame of this process: report and exit
            sys.stderr.write(f"coldstart: the forked server ended: {type(error).__name__}: {error}\n")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _serve(self, document: object) -> int:
        try:
            plan = LaunchPlan.parse_document(document)
        except ValueError as error:
            refuse(str(error))
            return 1
        plan.fallbacks.extend(self.fallbacks)
        return server.run(plan, imported=True)

    def _shed(self, connection: Channel) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        self.selector.close()
        self.listener.close()
        for held in (connection, *filter(None, self.servers.values())):
            held.close()

    def _reap(self) -> None:
        while self.servers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.servers.pop(pid, None)
            if connection is not None:
                self.selector.unregister(connection)
                _tell(connection, {"exit": os.waitstatus_to_exitcode(status)})
                connection.close()

    def _end_lease(self, pid: int) -> None:
        """End the server after a disconnect or at the client's SIGTERM; kill it at the client's SIGKILL."""
        connection = self.servers.get(pid)
        if connection is None:
            return  # already reaped in this iteration
        try:
            messages = connection.receive()
        except PeerError:
            messages = None
        for message in [{}] if messages is None else messages:
            _signal(pid, signal.SIGKILL if message.get("signal") == signal.SIGKILL else signal.SIGTERM)
        if messages is None:
            # No client is left to receive the server's exit code.
            self.servers[pid] = None
            self.selector.unregister(connection)
            connection.close()


def _signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # not yet the leader of its group; its PID is valid until it is reaped


def _tell(connection: Channel, message: dict[str, Any]) -> None:
    """Send a message. Ignore a client that has disconnected: the end of the connection also ends its lease."""
    with suppress(OSError):
        connection.send(message)


def _go_on_in_child() -> None:
    """Continue in a child, which ends with this process; this process waits for the child.

    The child has none of gloo's threads, which would be frozen and created again in every thawed process.
    """
    os.environ[SUPERVISOR_ENV] = str(os.getpid())
    if (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        os._exit(0)
    os.setsid()
    die_with_supervisor()


def main(argv: list[str]) -> None:
    """Run `template SOCKET LEVEL PLAN_FD READY_FD [alone|outlives]`: build, listen, acknowledge with one byte, fork servers.

    At a sleep level nothing is forked: the process itself wakes up. With `alone` a child of this process takes its place,
    without the threads that building has created. The process ends with the one that started it; with `outlives`, only until
    it has acknowledged.
    """
    if SUPERVISOR_ENV in os.environ:
        die_with_supervisor()
    path, level, ready = Path(argv[0]), argv[1], int(argv[3])
    with os.fdopen(int(argv[2])) as plan_file:  # servers and snapshots must not inherit it
        plan_file.seek(0)
        plan = LaunchPlan.parse(plan_file.read())
    gc.disable()
    # Files that building leaves in the temporary directory are removed with the template's directory.
    tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=path.parent)
    if level in SLEEP_LEVELS:
        from coldstart.vllm.engine import standby

        code = standby.run(plan, level, path, ready)
        path.unlink(missing_ok=True)
        sys.exit(code)
    fallbacks = build(plan, level)
    if argv[4:] == ["alone"]:
        _go_on_in_child()
    path.with_name(fingerprint.MODULES).write_text(json.dumps(fingerprint.list_imported_files()))
    listener = Listener(path)
    if argv[4:] == ["outlives"]:
        die_with_parent(0)
    os.write(ready, b"1")
    os.close(ready)
    Template(listener, fallbacks).run()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
