"""Resident engine that sleeps in vLLM's sleep mode, level 1 or 2, and wakes for one server at a time.

Level 1 keeps the weights in host memory, level 2 reads them again; both free the device. Our sleep backend does that where it
can be used, and otherwise vLLM's own, which is a fallback. A parked engine sleeps at level 1 and
leaves nothing on the device. A request for a server gets this
process itself: it wakes the engine, generates one token as proof, listens at the requested address, and sleeps again when its
lease ends. The request's engine arguments must equal those of the sleeping engine; its server arguments are free.
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
from coldstart.system import fingerprint, start_progress, timeline
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import Listener, PeerError
from coldstart.system.proc.scratch import use_scratch_directory
from coldstart.vllm import compat, sleep
from coldstart.vllm.engine import server, stepdowns
from coldstart.vllm.engine.adoption import describe
from coldstart.vllm.engine.application import EarlyApplication
from coldstart.vllm.engine.parked import ParkedEngine
from coldstart.vllm.engine.readiness import Readiness, refuse

SERVING = "serving"
"""A file beside the socket that exists while a server runs."""
PATIENCE_S, AGAIN_S = 10.0, 0.1


def describe_difference(held: dict[str, str], asked: dict[str, str]) -> str | None:
    """Return the engine arguments in which `asked` differs from `held`, or None."""
    names = [name for name, value in held.items() if asked[name] != value]
    return f"the sleeping engine was started with another value of: {', '.join(names)}" if names else None


async def wake(engine: Any, level: int) -> None:
    """Restore all of the engine's memory. At level 2 the weights are read again before the KV cache is allocated."""
    with timeline.measure("wake the engine", track="server"):
        await engine.wake_up(**({} if level == 1 else {"tags": ["weights"]}))
    if level == 1:
        return
    with timeline.measure("load weights", track="server"):
        await engine.collective_rpc("reload_weights")
    with timeline.measure("allocate the KV cache", track="server"):
        await engine.wake_up(tags=["kv_cache"])


class Standby:
    """The sleeping engine, and the server that has it."""

    def __init__(
        self,
        engine: Any,
        level: int,
        held: dict[str, str],
        listener: Listener,
        place: Path,
        parked: ParkedEngine | None,
        backend: Fallback | None,
    ) -> None:
        self.engine, self.level, self.held, self.listener = engine, level, held, listener
        self.parked, self.backend = parked, backend
        self.mark = place / SERVING
        self.ended = asyncio.Event()
        self.lease: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.serving: asyncio.Task[int] | None = None
        self.awake = False

    async def reside(self) -> None:
        """Accept requests until a signal, or until the engine has died."""
        loop = asyncio.get_running_loop()
        self._take_signals()
        loop.add_reader(self.listener.fileno(), self._accept)
        await self.ended.wait()
        loop.remove_reader(self.listener.fileno())
        if self.lease is not None:
            if self.serving is not None:
                self.serving.cancel()
            await asyncio.wait([self.lease], timeout=PATIENCE_S)

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
            # A client that is cut off while it sends does not receive the response.
            await asyncio.to_thread(connection.receive_request)
            _tell(connection, {"error": "the engine already runs another server"})

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
                _tell(connection, {"error": str(error)})
                return
            _tell(connection, {"pid": os.getpid()})
            leave = await asyncio.to_thread(os.read, descriptors[4], 1)
            os.close(descriptors[4])
            if not leave:  # the client found that this engine does not fit, or has disconnected
                for descriptor in descriptors[:4]:
                    os.close(descriptor)
                return
            code = 1
            self.mark.touch()
            try:
                with _in_the_place_of(request, descriptors):
                    code = await self._serve(plan, connection)
            except OSError as error:  # the client's directory was removed
                sys.stderr.write(f"coldstart: cannot start the server: {error}\n")
            self.mark.unlink(missing_ok=True)
            _tell(connection, {"exit": code})
        if self.parked is not None and not self.ended.is_set() and not await self.parked.park():
            self.ended.set()

    async def _serve(self, plan: LaunchPlan, connection: Channel) -> int:
        """Run one server until its lease or its engine ends, and return its exit code."""
        loop = asyncio.get_running_loop()
        try:
            plan.install()
            args, fallbacks = server.parse_args(plan.vllm_args)
            plan.fallbacks.extend(fallbacks)
            if self.backend is not None:
                plan.fallbacks.append(self.backend)
            if self.parked is not None and self.parked.reason is not None:
                plan.fallbacks.append(Fallback("parked", f"the engine only slept: {self.parked.reason}"))
            if reason := describe_difference(self.held, describe(args)):
                refuse(reason)
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
                refuse(reason)
                return 1
            self.awake = True
            app.begin(args, self.engine.vllm_config)
            await wake(self.engine, self.level)
            if self.backend is None:
                plan.fallbacks.extend(await sleep.take_fallbacks(self.engine))
            readiness = Readiness(plan, self.engine, worker_reports=stepdowns.reports(args))
            if not await readiness.proven():
                return 1
            # When this is cancelled or a signal arrives, vLLM's shutdown decides how its HTTP server ends.
            with app.provide():
                shutdown = await build_and_serve(
                    self.engine, address, sock, args, callback_notify=readiness.listening
                )
            ending = asyncio.ensure_future(shutdown)
            await asyncio.sleep(0)  # the server stops listening
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            while not ending.done() and asyncio.get_running_loop().time() < deadline:
                # Abort the pending answers, and repeat that for requests that reached the engine meanwhile: in its
                # queue they would be answered when the next client wakes it.
                await self._sleep()
                await asyncio.wait([ending], timeout=AGAIN_S)
                self.awake = not ending.done() and not self.ended.is_set()
            return 1 if self.engine.errored else 0
        finally:
            if ending is not None:
                ending.cancel()
            if readiness is not None and not readiness.done and readiness.descriptor >= 0:
                os.close(readiness.descriptor)  # the closed pipe is the client's answer
            sock.close()

    async def _sleep(self) -> None:
        """Put the engine back to sleep. If that fails, end this process: the engine is useless to the next client."""
        self._take_signals()  # vLLM's server had replaced the handlers
        if not self.awake:
            return
        self.awake = False
        try:
            await self.engine.sleep(self.level)
        except Exception as error:  # noqa: BLE001 - the engine has died, or a signal ended it
            sys.stderr.write(f"coldstart: the engine cannot sleep: {type(error).__name__}: {error}\n")
            self.ended.set()

    def _end_lease(self, connection: Channel, serving: asyncio.Task[int]) -> None:
        """Handle a message of the client: end the server at SIGTERM or a disconnect, and kill this process at SIGKILL."""
        try:
            messages = connection.receive()
        except PeerError:
            messages = None
        if any(message.get("signal") == signal.SIGKILL for message in messages or ()):
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        serving.cancel()


def _tell(connection: Channel, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the client may have disconnected
        connection.send(message)


@contextmanager
def _in_the_place_of(request: dict[str, Any], descriptors: list[int]) -> Iterator[None]:
    """Use the client's standard streams, directory and environment in the block, without keeping its secrets."""
    held, own, where = [os.dup(n) for n in range(3)], dict(os.environ), Path.cwd()
    try:
        os.environ.clear()
        os.environ.update({**request["env"], READY_FD_ENV: str(descriptors[3])})
        start_progress.start_reporting()
        server.renew_environment()
        for target, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(request["cwd"])
        yield
    finally:
        start_progress.stop_reporting()
        refuse("the server ended before it was ready")  # if it has reported nothing yet
        os.environ.clear()
        os.environ.update(own)
        os.chdir(where)
        sys.stdout.flush()
        sys.stderr.flush()
        for target, descriptor in enumerate(held):
            os.dup2(descriptor, target)
            os.close(descriptor)


async def _reside(plan: LaunchPlan, level: str, listening: Path, acknowledge: int) -> int:
    args, _ = server.parse_args(plan.vllm_args)
    held, backend = describe(args), sleep.choose(args)
    # Each server builds its own application; here it only needs the imported modules.
    async with server.engine_client(args, plan, EarlyApplication()) as engine:
        gc.enable()
        backend = backend or await sleep.bind(engine, str(args.model))
        await engine.sleep(SLEEP_LEVELS[level])
        parked = await ParkedEngine.create(engine) if level == PARKED else None
        listening.with_name(fingerprint.MODULES).write_text(json.dumps(fingerprint.list_imported_files()))
        with Listener(listening) as listener:
            os.write(acknowledge, b"1")
            os.close(acknowledge)
            sleep_level = SLEEP_LEVELS[level]
            try:
                await Standby(engine, sleep_level, held, listener, listening.parent, parked, backend).reside()
            finally:
                if parked is not None:
                    parked.close()
        return 0


def run(plan: LaunchPlan, level: str, listening: Path, acknowledge: int) -> int:
    """Build the engine, put it to sleep, listen at `listening`, and report that with one byte. Return the exit code at its end.

    Raises:
        RuntimeError: This vLLM does not support it.
    """
    plan.install()
    if reason := compat.check("start", server.import_runtime) or compat.check("standby"):
        raise RuntimeError(f"cannot keep a sleeping engine: {reason}")
    import uvloop

    with use_scratch_directory():
        return int(uvloop.run(_reside(plan, level, listening, acknowledge)))
