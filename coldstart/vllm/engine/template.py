"""Template process that forks servers, with the runtime imported and, optionally, the engine's worker built.

The template has one Python thread and no OpenMP team, because a fork copies only one thread. torch.distributed's gloo
creates threads even for a group of one rank. A forked server does not need these threads, but it would need those of a
larger group, so larger groups are rejected. A forked server adopts the built worker if its configuration is the same;
otherwise, it builds its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

from coldstart.contract.environment import SUPERVISOR_PID, TIMELINE_OFFSET_S
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import ENGINE, READY_FD_ENV, SLEEP_LEVELS, LaunchPlan
from coldstart.system import fingerprint, runtime, timeline
from coldstart.system.ipc import addresses, json_lines
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import Listener, PeerError
from coldstart.system.proc import own_process
from coldstart.system.proc.lifeline import die_with_parent, die_with_supervisor
from coldstart.vllm import compat
from coldstart.vllm.engine import adoption, application, components, server
from coldstart.vllm.engine.readiness import report_failures, report_unfit, send_report, take_ready_pipe


def build_template(plan: LaunchPlan, level: str) -> components.Fallbacks:
    """Import the runtime.

    At level `engine`, also build the worker, which loads the weights and the compiled forward function. Returns:
        The fallbacks that the forked servers cannot detect themselves.

    Raises:
        RuntimeError: The installed vLLM does not support templates, another Python thread runs, or level `engine` was
            requested on a GPU or for more than one rank. This process must not be forked after this error.
    """
    if level == ENGINE and not runtime.targets_cpu():
        raise RuntimeError("cannot build an engine template on a GPU: CUDA contexts do not survive a fork")
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # the monitor would be a thread
    plan.install()
    if reason := compat.find_unsupported_reason(
        "start", server.import_runtime
    ) or compat.find_unsupported_reason("start", server.import_engine):
        raise RuntimeError(f"cannot build a template: {reason}")
    args, _ = server.parse_args(plan.vllm_args)
    fallbacks: components.Fallbacks = []
    lack, arguments = None, dict[str, Any]()
    if level == ENGINE:
        lack = compat.find_unsupported_reason("template") or compat.find_unsupported_reason("worker")
        arguments = {} if lack else adoption.describe_worker(args, plan)
    config = server.create_config(args)
    application.warm_up(args, config)
    compat.find_unsupported_reason("ahead", register_kernel_overrides)
    if reason := compat.find_unsupported_reason("start", partial(server.import_gpu_engine, config)):
        fallbacks.append(Fallback("template", f"{reason}; each server imports the engine itself"))
    if is_cuda_initialized():
        raise RuntimeError(
            "cannot fork servers: an import initialized CUDA, and a forked process could not use the GPU"
        )
    if lack:
        fallbacks.append(Fallback("template", f"{lack}; each server builds its own worker"))
    elif level == ENGINE:
        from vllm.tokenizers import cached_tokenizer_from_config

        from coldstart.vllm.engine import executor

        if config.parallel_config.world_size > 1:
            raise RuntimeError(
                "cannot build an engine template for several ranks: gloo's threads do not survive a fork"
            )
        cached_tokenizer_from_config(config.model_config)
        executor.prebuild_worker(config, arguments)
        # gloo listens even for a group of one rank, and a thawed template would need the same ports again.
        addresses.close_listening_sockets()
    # Native threads (/proc/self/task) are not counted: a process that has imported numpy and vLLM always has some.
    if threading.active_count() > 1:
        raise RuntimeError(
            f"cannot fork servers while other threads run: {', '.join(t.name for t in threading.enumerate())}"
        )
    gc.collect()
    own_process.trim_heap()
    gc.freeze()
    return fallbacks


def register_kernel_overrides() -> None:
    """Run a CPU worker's search for Triton kernels to override once, before the fork.

    The search takes a third of a second, and makes a forked worker copy the memory that it reads. A module that a server
    imports later gets the override from the module that defines the kernel.
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
    """Return whether torch or another library has initialized CUDA, after which a forked process cannot use the GPU."""
    if runtime.targets_cpu():
        return False
    import torch

    if torch.cuda.is_initialized():
        return True
    # Open files of the GPU do not show this: NVML opens them, too, and a forked process can still use the GPU.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALIZED


NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: result of each function of the driver until a library calls cuInit."""
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class Template:
    """Loop that forks a server for each request, and reports the server's exit code to the client.

    It runs on one thread; a self-pipe turns SIGCHLD into an event.
    """

    def __init__(self, listener: Listener, fallbacks: components.Fallbacks | None = None) -> None:
        self.listener, self.fallbacks = listener, fallbacks or []
        self.selector = selectors.DefaultSelector()
        self.servers: dict[int, Channel | None] = {}
        self.stopping = False

    def run(self) -> None:
        """Fork servers on request until SIGTERM or SIGINT. A forked server exits when its client disconnects."""
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
        connection.try_send({"pid": pid})

    def _refuse(self, connection: Channel, reason: str) -> None:
        connection.try_send({"error": reason})
        connection.close()

    def _become_server(self, received: float, connection: Channel) -> None:
        """Turn the forked child into the requested server, and never return.

        Only the child reads the request, because it contains secrets and the template outlives the start.
        """
        code = 1
        try:
            request = json_lines.read_document(connection.take_descriptor())
            descriptors = [connection.take_descriptor() for _ in range(5)]
            self._drop_template_state(connection)
            die_with_parent()
            if not os.read(descriptors[4], 1):
                return  # the client rejected this template, or has disconnected
            os.close(descriptors[4])
            for target, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, target)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            server.reapply_environment()
            tempfile.tempdir = None
            os.environ[READY_FD_ENV] = str(descriptors[3])
            # A thawed process may be in a time namespace whose CLOCK_MONOTONIC differs from the client's.
            os.environ[TIMELINE_OFFSET_S] = str(request["now"] - received)
            own_process.reseed_random_state()
            own_process.request_amx_tiles()  # thawing loses the permission
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
            report_unfit(str(error))
            return 1
        plan.fallbacks.extend(self.fallbacks)
        return server.run(plan, is_imported=True)

    def _drop_template_state(self, connection: Channel) -> None:
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
                connection.try_send({"exit": os.waitstatus_to_exitcode(status)})
                connection.close()

    def _end_lease(self, pid: int) -> None:
        """Stop the server at the client's SIGTERM or disconnect, and kill it at the client's SIGKILL."""
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
        os.kill(pid, number)  # it does not lead its process group yet; its PID is valid until it is reaped


def _continue_in_child() -> None:
    """Continue in a forked child while this process waits for it. The child exits if this process dies.

    The child does not have gloo's threads, which would otherwise be frozen and created again in every thawed process.
    """
    os.environ[SUPERVISOR_PID] = str(os.getpid())
    if (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        os._exit(0)
    os.setsid()
    die_with_supervisor()


def main(argv: list[str]) -> None:
    """Run `template SOCKET LEVEL PLAN_FD [alone|outlives]`: build the template, listen, and fork servers.

    The pipe READY_FD_ENV receives an empty report when the template listens, or the error that prevents it. At a sleep level,
    this process forks no servers and wakes its own engine instead. With `alone`, a forked child continues without the threads
    of the build. The process exits when its parent exits; with `outlives`, this applies only until the template listens.
    """
    if SUPERVISOR_PID in os.environ:
        die_with_supervisor()
    path, level = Path(argv[0]), argv[1]
    with os.fdopen(int(argv[2])) as plan_file:  # servers and snapshots must not inherit this descriptor
        plan_file.seek(0)
        plan = LaunchPlan.parse(plan_file.read())
    gc.disable()
    # Temporary files of the build are removed with the template's directory.
    tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=path.parent)
    if level in SLEEP_LEVELS:
        from coldstart.vllm.engine import standby

        with report_failures():
            code = standby.run_standby(plan, level, path)
        path.unlink(missing_ok=True)
        sys.exit(code)
    with report_failures():
        fallbacks = build_template(plan, level)
    if argv[3:] == ["alone"]:
        _continue_in_child()
    path.with_name(fingerprint.MODULES).write_text(json.dumps(fingerprint.list_imported_files()))
    listener = Listener(path)
    if argv[3:] == ["outlives"]:
        die_with_parent(0)
    send_report(take_ready_pipe(), {})
    Template(listener, fallbacks).run()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
