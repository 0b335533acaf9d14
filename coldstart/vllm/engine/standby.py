"""Resident engine that sleeps in vLLM's sleep mode and wakes for one server at a time.

At level 1, the weights stay in host memory; at level 2, they are read from the files again. Both levels free GPU memory,
with coldstart's sleep backend if it is supported, and otherwise with vLLM's own backend (a fallback). A parked engine
sleeps at level 1 and has no GPU context. This process itself becomes the requested server: it wakes the engine, generates
one token as a check, listens at the requested address, and sleeps again when the lease ends. The engine arguments of the
request must equal those of the sleeping engine; the server arguments may differ.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import PARKED, READY_FD_ENV, SLEEP_LEVELS, LaunchPlan
from coldstart.system import fingerprint, start_progress
from coldstart.system.devices.parking import ParkingError
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import Listener, PeerError
from coldstart.system.proc.scratch import use_scratch_directory
from coldstart.vllm import compat, sleep
from coldstart.vllm.engine import components, server
from coldstart.vllm.engine.adoption import describe_engine
from coldstart.vllm.engine.application import EarlyApplication
from coldstart.vllm.engine.readiness import Readiness, report_unfit, send_report, take_ready_pipe
from coldstart.vllm.engine.sleeping import ParkedEngine, wake_engine

SERVING = "serving"
"""Name of a file in the socket's directory that exists while a server runs."""
STOP_TIMEOUT_S, RETRY_S = 10.0, 0.1


def describe_difference(sleeping: dict[str, str], requested: dict[str, str]) -> str | None:
    """Return a message that names the engine arguments in which the two engines differ, or None if they are equal."""
    names = [name for name, value in sleeping.items() if requested[name] != value]
    return f"the sleeping engine was started with different values of {', '.join(names)}" if names else None


class StandbyEngine:
    """Sleeping engine, and the server that currently uses the engine.

    `arguments` are the engine arguments by name. `backend` is the fallback to vLLM's own sleep backend, or None.
    """

    def __init__(
        self,
        engine: Any,
        level: int,
        arguments: dict[str, str],
        listener: Listener,
        directory: Path,
        parked: ParkedEngine | None,
        backend: Fallback | None,
    ) -> None:
        self.engine, self.level, self.arguments, self.listener = engine, level, arguments, listener
        self.parked, self.backend = parked, backend
        self.mark = directory / SERVING
        self.ended = asyncio.Event()
        self.lease: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.serving: asyncio.Task[int] | None = None
        self.awake = False

    async def serve_requests(self) -> None:
        """Accept requests to start a server until a signal arrives or the engine dies."""
        loop = asyncio.get_running_loop()
        self._take_signals()
        loop.add_reader(self.listener.fileno(), self._accept)
        await self.ended.wait()
        loop.remove_reader(self.listener.fileno())
        if self.lease is not None:
            if self.serving is not None:
                self.serving.cancel()
            await asyncio.wait([self.lease], timeout=STOP_TIMEOUT_S)

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ended.set)

    def _accept(self) -> None:
        if (accepted := self.listener.accept()) is None:
            return
        connection = Channel(accepted)
        free = self.lease is None or self.lease.done()
        task = asyncio.create_task(self._lend(connection) if free else self._turn_away(connection))
        if free:
            self.lease = task
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _turn_away(self, connection: Channel) -> None:
        with connection, suppress(PeerError):
            # A client that still sends when the connection closes would not receive the response.
            await asyncio.to_thread(connection.receive_request)
            connection.try_send(
                {"error": "cannot start the server: the sleeping engine already runs another server"}
            )

    async def _lend(self, connection: Channel) -> None:
        with connection:
            try:
                await asyncio.to_thread(connection.receive_request)
                request = json_lines.read_document(connection.take_descriptor())
                plan = LaunchPlan.parse_document(request["plan"])
                # The sleeping engine has captured all graphs.
                plan = replace(plan, engine=replace(plan.engine, deferred=False))
                descriptors = [connection.take_descriptor() for _ in range(5)]
            except (PeerError, ValueError, KeyError) as error:
                connection.try_send({"error": str(error)})
                return
            connection.try_send({"pid": os.getpid()})
            is_confirmed = await asyncio.to_thread(os.read, descriptors[4], 1)
            os.close(descriptors[4])
            if not is_confirmed:  # the client rejected this engine, or has disconnected
                for descriptor in descriptors[:4]:
                    os.close(descriptor)
                return
            code = 1
            self.mark.touch()
            try:
                with _use_client_environment(request, descriptors):
                    code = await self._serve(plan, connection)
            except OSError as error:  # the client's directory was removed
                sys.stderr.write(f"coldstart: cannot start the server: {error}\n")
            self.mark.unlink(missing_ok=True)
            # A client that starts the next server when this one has ended must find the engine parked.
            if self.parked is not None and not self.ended.is_set() and not await _park(self.parked):
                self.ended.set()
            connection.try_send({"exit": code})

    async def _serve(self, plan: LaunchPlan, connection: Channel) -> int:
        """Run one server until its lease ends or the engine dies, and return its exit code."""
        loop = asyncio.get_running_loop()
        try:
            plan.install()
            args, fallbacks = server.parse_args(plan.vllm_args)
            plan.fallbacks.extend(fallbacks)
            if self.backend is not None:
                plan.fallbacks.append(self.backend)
            if self.parked is not None and self.parked.reason is not None:
                plan.fallbacks.append(Fallback("parked", f"the engine was only asleep: {self.parked.reason}"))
            if reason := describe_difference(self.arguments, describe_engine(args)):
                report_unfit(reason)
                return 1
            self.serving = asyncio.create_task(self._awake(plan, args))
            loop.add_reader(connection.fileno(), self._end_lease, connection, self.serving)
            try:
                return await self.serving
            except asyncio.CancelledError:
                return 0
            finally:
                loop.remove_reader(connection.fileno())
        except Exception as error:  # noqa: BLE001 - after any error of vLLM its server has ended, and its client must know
            sys.stderr.write(f"coldstart: the woken server ended: {type(error).__name__}: {error}\n")
            return 1
        except SystemExit as error:  # from vLLM's parser, for unknown arguments
            return int(error.code or 0) if isinstance(error.code, int) else 1
        finally:
            await self._sleep()

    async def _awake(self, plan: LaunchPlan, args: Namespace) -> int:
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve
        from vllm.entrypoints.launchers.launcher import setup_server

        address, sock = setup_server(args, reuse_port=False)
        readiness: Readiness | None = None
        ending: asyncio.Future[None] | None = None
        app = EarlyApplication()
        try:
            if self.parked is not None and (reason := await self.parked.unpark()):
                report_unfit(reason)
                return 1
            self.awake = True
            app.start_building(args, self.engine.vllm_config)
            await wake_engine(self.engine, self.level)
            if self.backend is None:
                plan.fallbacks.extend(await sleep.pop_fallbacks(self.engine))
            readiness = Readiness(
                plan, self.engine, has_reporting_workers=components.has_reporting_workers(args)
            )
            if not await readiness.check_canary():
                return 1
            # When this is cancelled or a signal arrives, vLLM's shutdown decides how its HTTP server ends.
            with app.provide_to_vllm():
                shutdown = await build_and_serve(
                    self.engine, address, sock, args, callback_notify=readiness.report_ready
                )
            ending = asyncio.ensure_future(shutdown)
            await asyncio.sleep(0)  # the server stops listening
            deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
            while not ending.done() and asyncio.get_running_loop().time() < deadline:
                # Abort the pending requests, repeatedly: a request that arrives meanwhile would otherwise stay queued and
                # run when the next client wakes the engine.
                await self._sleep()
                await asyncio.wait([ending], timeout=RETRY_S)
                self.awake = not ending.done() and not self.ended.is_set()
            return 1 if self.engine.errored else 0
        finally:
            if ending is not None:
                ending.cancel()
            if readiness is not None and not readiness.is_reported and readiness.descriptor >= 0:
                os.close(readiness.descriptor)  # the closed pipe tells the client that the start failed
            sock.close()

    async def _sleep(self) -> None:
        """Put the engine back to sleep. If that fails, stop this process, because no other client can use the engine."""
        self._take_signals()  # vLLM's server replaced the handlers
        if not self.awake:
            return
        self.awake = False
        try:
            await self.engine.sleep(self.level)
        except Exception as error:  # noqa: BLE001 - the engine has died, or a signal ended it
            sys.stderr.write(f"coldstart: the engine cannot sleep: {type(error).__name__}: {error}\n")
            self.ended.set()

    def _end_lease(self, connection: Channel, serving: asyncio.Task[int]) -> None:
        """Handle a client message: stop the server at SIGTERM or a disconnect, and kill this process at SIGKILL."""
        try:
            messages = connection.receive()
        except PeerError:
            messages = None
        if any(message.get("signal") == signal.SIGKILL for message in messages or ()):
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        serving.cancel()


async def _park(engine: ParkedEngine) -> bool:
    """Park the sleeping engine, or log why it only sleeps. Return False if it is unusable."""
    if (reason := await engine.park()) is not None:
        sys.stderr.write(f"coldstart: cannot park the engine, which stays asleep: {reason}\n")
    return not engine.is_lost


@contextmanager
def _use_client_environment(request: dict[str, Any], descriptors: list[int]) -> Iterator[None]:
    """Use the client's standard streams, directory and environment in this block, and restore this process's own after it."""
    held, own, where = [os.dup(n) for n in range(3)], dict(os.environ), Path.cwd()
    try:
        os.environ.clear()
        os.environ.update({**request["env"], READY_FD_ENV: str(descriptors[3])})
        start_progress.start_reporting()
        server.reapply_environment()
        for target, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(request["cwd"])
        yield
    finally:
        start_progress.stop_reporting()
        report_unfit("the server stopped before it was ready")  # ignored if readiness was reported
        os.environ.clear()
        os.environ.update(own)
        os.chdir(where)
        sys.stdout.flush()
        sys.stderr.flush()
        for target, descriptor in enumerate(held):
            os.dup2(descriptor, target)
            os.close(descriptor)


async def _reside(plan: LaunchPlan, level: str, listening: Path) -> int:
    args, _ = server.parse_args(plan.vllm_args)
    held, backend = describe_engine(args), sleep.choose_backend(args)
    # Each server builds its own application; this one only imports the modules.
    async with server.start_engine(args, plan, EarlyApplication()) as engine:
        gc.enable()
        backend = backend or await sleep.manage_worker_weights(engine, str(args.model))
        await engine.sleep(SLEEP_LEVELS[level])
        parked = await ParkedEngine.find(engine) if level == PARKED else None
        if parked is not None and not await _park(parked):
            raise ParkingError(parked.reason)
        listening.with_name(fingerprint.MODULES).write_text(json.dumps(fingerprint.list_imported_files()))
        with Listener(listening) as listener:
            send_report(take_ready_pipe(), {})
            sleep_level = SLEEP_LEVELS[level]
            try:
                await StandbyEngine(
                    engine, sleep_level, held, listener, listening.parent, parked, backend
                ).serve_requests()
            finally:
                if parked is not None:
                    await parked.close()
        return 0


def run_standby(plan: LaunchPlan, level: str, socket_path: Path) -> int:
    """Build the engine, put it to sleep, and run servers on it until this process is stopped. Return the exit code.

    An empty report is sent when the process listens at `socket_path`. `level` is a sleep level or `parked`.

    Raises:
        RuntimeError: This vLLM does not support sleeping engines.
    """
    plan.install()
    if reason := compat.find_unsupported_reason(
        "start", server.import_runtime
    ) or compat.find_unsupported_reason("standby"):
        raise RuntimeError(f"cannot keep a sleeping engine: {reason}")
    import uvloop

    with use_scratch_directory():
        return int(uvloop.run(_reside(plan, level, socket_path)))
