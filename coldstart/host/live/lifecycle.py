"""Life cycle of a host's model servers: start, sleep, wake-up and exit.

The tiers `asleep-N` are vLLM's sleep levels, which vLLM offers with `--enable-sleep-mode` on platforms that support it. Its
routes for them exist only in its development mode, which also opens routes that call worker methods, replace weights and
show the configuration. At level 2 the wake-up needs these, too (see `vllm.engine.sleeping`). A server in the tier `parked`
sleeps at level 1, and the driver then moves the rest of its GPU state to host memory.

Invariant: only a model with a sleeping tier is started in development mode. Its server listens on a Unix socket in this
host's private directory, and the gateway forwards none of these routes.

Invariant: every order results in exactly one event, whatever happens to the process. StartModel results in ModelReady or
ModelFailed, ChangeTier in TierChanged or ModelFailed, and ReplaceServer in ReplacementEnded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from coldstart.contract import fallback
from coldstart.contract.environment import VLLM_SERVER_DEV_MODE
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import PARKED, SLEEP_LEVELS
from coldstart.host import events
from coldstart.host.core import Core
from coldstart.host.events import Event, Failure
from coldstart.host.launches import Launch
from coldstart.host.live import messages
from coldstart.host.live.log import BackgroundTasks
from coldstart.host.live.metrics import EventRecorder
from coldstart.host.live.moves import enable_handover
from coldstart.host.live.profiles import MemoryMeter, build_device_environment
from coldstart.host.live.servers import (
    ModelServer,
    ReadyServer,
    ServerStarter,
    StartFailedError,
    await_hang,
    stop_by_force,
)
from coldstart.host.live.starter import StartOrder
from coldstart.host.live.templates import RuntimeTemplate
from coldstart.host.live.upstream import Replica, Upstream
from coldstart.host.model_state import ModelState
from coldstart.host.specification import AWAKE, STOPPED
from coldstart.launch.listening import DEFAULT_HOST
from coldstart.system.devices.parking import ParkingError
from coldstart.vllm.engine.sleeping import ParkedEngine, RemoteEngine, wake_engine
from coldstart.vllm.sleep import STAGE, pop_fallbacks

STOPPING = "the host is stopping"
MEASURE_FIRST_S, MEASURE_EVERY_S = 1.0, 30.0
# A longer wait for a template, in seconds, is shown as a phase of the start. The wait for a ready template is shorter.
WAIT_S = 0.001


class LocalReplica(Replica):
    """Server of a model on this host. `began` is the time in seconds at which its start was ordered."""

    def __init__(self, launch: Launch, server: ModelServer, began: float, handover_key: str = "") -> None:
        key = messages.find_server_key(launch.args)
        super().__init__(launch.name, Upstream(server.socket), key, handover_key)
        self.launch, self.server, self.began = launch, server, began
        self.ready = ReadyServer("", None, {})
        self.is_ending = False
        self.reason = ""
        self.failure: Failure | None = None
        self.engine, self.sleep_level = RemoteEngine(self._post), 0
        self.parked: ParkedEngine | None = None
        self.fallbacks: list[Fallback] = []

    @property
    def is_serving(self) -> bool:
        """Return whether the server is ready and is not shutting down."""
        return bool(self.start_s) and not self.is_ending

    async def _post(self, path: str, body: bytes) -> bytes:
        async with await self.upstream.request("POST", path, body=body) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise ConnectionError(f"POST {path} returned HTTP status {answer.status}: {content[:200]!r}")
        return content

    async def sleep(self, tier: str) -> None:
        """Put the server into a sleeping tier. One that sleeps can only be parked. Raises various errors."""
        if tier not in SLEEP_LEVELS or (self.sleep_level and tier != PARKED):
            raise ValueError(f"the server cannot move from sleep level {self.sleep_level} to tier {tier}")
        if not self.sleep_level:
            self.sleep_level = SLEEP_LEVELS[tier]
            await self.engine.sleep(self.sleep_level)
        if tier == PARKED:
            self.parked = self.parked or await ParkedEngine.find(self.engine)
            if reason := await self.parked.park():
                raise ParkingError(f"the server cannot be parked: {reason}")

    async def wake(self) -> None:
        """Wake the server, and record the fallbacks of its sleep backend in `fallbacks`. Raises various errors."""
        if self.parked is not None and (reason := await self.parked.unpark()):
            raise ParkingError(reason)
        await wake_engine(self.engine, self.sleep_level)
        self.sleep_level = 0
        if self.ready.document.get("fast_path", {}).get(STAGE):
            self.fallbacks = await pop_fallbacks(self.engine)

    async def stop(self, reason: str = "") -> None:
        """Stop the server, by force if it does not exit in time. Waiting requests fail with `reason`."""
        self.is_ending = True
        self.reason = self.reason or reason
        await stop_by_force(self.server)


class ServerLifecycle:
    """Manager of a host's template and servers. `emit` sends an event to the core.

    `replicas` maps model names to the servers that get requests. `others` are the servers that are starting to replace one of
    them, and servers that were replaced. `move_requests` ends when the first server has no more requests, which it may move
    to the second.
    """

    def __init__(
        self,
        core: Core,
        launches: Mapping[str, Launch],
        servers: ServerStarter,
        *,
        record: EventRecorder,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        meter: MemoryMeter,
        move_requests: Callable[[LocalReplica, LocalReplica], Awaitable[None]],
    ) -> None:
        self.core, self.launches, self.servers = core, launches, servers
        self.record, self.emit, self.clock, self.meter = record, emit, clock, meter
        self.log, self.facts, self.move_requests = record.log, record.facts, move_requests
        self.replicas: dict[str, LocalReplica] = {}
        self.others: set[LocalReplica] = set()
        self._ordered: dict[str, Launch] = {}
        self.template = RuntimeTemplate(servers, self.log, self.facts)
        self._tasks = BackgroundTasks(self.log)

    def execute(self, order: events.StartModel | events.ReplaceServer | events.ChangeTier) -> None:
        """Begin to execute an action of the core. An event reports when the action is complete."""
        match order:
            case events.StartModel(model, tier):
                known = self.replicas.get(model)
                self._tasks.spawn(self._wake(known, tier.name) if known else self._start(model, tier.name))
            case events.ReplaceServer(model, reason):
                self.log.write("replace", model=model, reason=reason)
                self._ordered[model] = self.launches[model]
                self._tasks.spawn(self._start(model, AWAKE, self.replicas.get(model)))
            case events.ChangeTier(model, tier, reason):
                self._tasks.spawn(self._change_tier(model, tier.name, reason))

    def _too_late(self) -> str:
        return f"the server was not ready within {self._ready_timeout_s:g} s"

    @property
    def _ready_timeout_s(self) -> float:
        return self.core.settings.ready_timeout_s

    async def _start(self, model: str, tier: str, replaced: LocalReplica | None = None) -> None:
        """Start a server of a model and monitor it until it exits. Once ready, it takes over the requests of `replaced`."""
        launch, began = (self._ordered if replaced else self.launches)[model], self.clock()
        self.log.write("start", model=model, tier=tier)
        # The wait may time out slightly before the deadline of the start.
        in_time = await self.template.wait_until_ready(launch)
        waited_s = self.clock() - began
        if replaced is not None and not self._is_wanted(launch, replaced):
            self._end_replacement(launch)
            return
        replica = self._begin(launch, began, self._ready_timeout_s - waited_s if in_time else 0.0)
        if isinstance(replica, str):
            self._record_failed_start(model, replica, waited_s)
            if replaced is None:
                self.emit(events.ModelFailed(model, replica))
            else:
                self._end_replacement(launch)
            return
        if replaced is None:
            self.replicas[model] = replica
        else:
            self.others.add(replica)
        watch = asyncio.create_task(self._end_if_hung(replica))
        try:
            if await self._await_ready(replica, waited_s) and await self._take_over(replica, replaced):
                self._report_ready(replica, replica.ready, replica.mode, replaced)
                await self._measure_until_end(replica)
        finally:
            watch.cancel()
            replica.upstream.close()
            if replica.parked is not None:
                self._tasks.spawn(replica.parked.close())
            replica.reason = replica.reason or await replica.server.ended
            is_other = replica in self.others
            self.others.discard(replica)
            if not is_other:
                del self.replicas[model]
                self.record.record_server_end(model)
        if replica.start_s and not replica.is_ending:
            self.log.write("server died", model=model, reason=replica.reason)
        if is_other:
            self._end_replacement(launch)
            return
        self._tasks.spawn(self._cancel_replacement(model))
        if replica.is_ending and replica.start_s:
            self.emit(events.TierChanged(model))
            if (known := self.core.models.get(model)) and known.state is ModelState.ASLEEP:
                # The server exited instead of going to sleep, so it cannot wake up.
                self.emit(events.ServerOutdated(model, "the server did not go to sleep"))
            return
        external = replica.server.was_killed or bool(replica.fault)
        cause = replica.failure or Failure(replica.reason)
        self.emit(events.ModelFailed(model, cause.message, external, cause.hint, cause.code))

    def _begin(self, launch: Launch, began: float, remaining_s: float) -> LocalReplica | str:
        """Start a server that must be ready within `remaining_s` seconds. Return it, or the reason if that fails."""
        if self.facts.stopping or remaining_s <= 0:
            return STOPPING if self.facts.stopping else self._too_late()
        environment, key = {**build_device_environment(launch), **self._open_sleep_routes(launch)}, ""
        order = launch
        if self.core.settings.resume_streams:
            words, key, more = enable_handover(launch, DEFAULT_HOST, on_cpu=self.meter.on_cpu)
            order, environment = replace(launch, args=launch.args.append(*words)), environment | more
        try:
            ordered = StartOrder(order, remaining_s, environment=environment, gpu_bytes=launch.gpu_bytes)
            server = self.servers.order_start(ordered)
        except OSError as error:  # no descriptor, no disk, no process
            return f"cannot start a server: {error.strerror or error}"
        return LocalReplica(launch, server, began, key)

    async def _take_over(self, replica: LocalReplica, replaced: LocalReplica | None) -> bool:
        """Let a ready server get the requests of `replaced`, and return True. If it is too late for that, stop the server."""
        if replaced is None:
            return True
        if not self._is_wanted(replica.launch, replaced):
            await replica.stop()
            return False
        self.others.remove(replica)
        self.others.add(replaced)
        self.replicas[replica.name] = replica
        del self._ordered[replica.name]
        self._tasks.spawn(self._finish(replaced, replica))
        return True

    def _is_wanted(self, launch: Launch, replaced: LocalReplica) -> bool:
        """Return whether a server for `launch` is still to get the requests of the server `replaced`."""
        model, now = self.core.models.get(launch.name), self.launches.get(launch.name)
        if model is None or now is None or now.server_identity != launch.server_identity:
            return False
        return model.is_being_replaced and self.replicas.get(launch.name) is replaced

    async def _finish(self, replaced: LocalReplica, replica: LocalReplica) -> None:
        await self.move_requests(replaced, replica)
        await replaced.stop()
        self.log.write("replaced", model=replica.name)

    async def _cancel_replacement(self, model: str) -> None:
        """Stop the server that is starting to replace a model's server, if there is one."""
        for other in [one for one in self.others if one.name == model and not one.start_s]:
            await other.stop()

    def _end_replacement(self, launch: Launch) -> None:
        """Report the end of a replacement, unless another server of the model is starting to replace one, or was replaced."""
        model = launch.name
        if self._ordered.get(model) is launch:
            del self._ordered[model]
        if model not in self._ordered and not any(one.name == model for one in self.others):
            self.emit(events.ReplacementEnded(model))

    def _open_sleep_routes(self, launch: Launch) -> Mapping[str, str]:
        """Return the environment variables that open vLLM's sleep and wake-up routes if the model has a sleeping tier."""
        can_sleep = launch.args.contains_flag("enable_sleep_mode")
        tiers = self.core.models[launch.name].spec.tiers if can_sleep else ()
        return {str(VLLM_SERVER_DEV_MODE): "1"} if any(tier.name in SLEEP_LEVELS for tier in tiers) else {}

    async def _await_ready(self, replica: LocalReplica, waited_s: float) -> bool:
        """Wait for the server, and return whether it became ready. `waited_s` is how long the start waited for a template."""
        left = self._ready_timeout_s - (self.clock() - replica.began)
        if not (await asyncio.wait([replica.server.ready], timeout=left))[0]:
            self.log.write("start aborted", model=replica.name, reason=self._too_late())
            await replica.stop(self._too_late())
        try:
            ready = await replica.server.ready
        except StartFailedError as failed:
            await replica.server.ended
            replica.failure = Failure(replica.reason) if replica.reason else failed.failure
            replica.reason = str(replica.failure)
            self._record_failed_start(replica.name, replica.reason, self.clock() - replica.began)
            return False
        replica.ready = ready.add_template_wait(waited_s) if waited_s > WAIT_S else ready
        replica.start_s, replica.mode = self.clock() - replica.began, ready.mode
        return True

    async def _measure_until_end(self, replica: LocalReplica) -> None:
        wait, name, ended = MEASURE_FIRST_S, replica.name, replica.server.ended
        while not ended.done():
            await asyncio.wait([ended], timeout=wait)
            wait = MEASURE_EVERY_S
            if (
                ended.done()
                or self.replicas.get(name) is not replica
                or replica.is_ending
                or replica.ready.pid is None
            ):
                continue
            with suppress(OSError):  # includes ProcessLookupError
                pid = replica.ready.pid
                self.facts.get_model(name).gpu_memory_bytes = await asyncio.to_thread(
                    self.meter.measure_gpu_bytes, pid
                )
                memory = await asyncio.to_thread(self.meter.measure_pss_bytes, pid)
                if memory is not None and not ended.done():
                    self.emit(events.MemoryMeasured(name, max(1, memory)))

    async def _end_if_hung(self, replica: LocalReplica) -> None:
        server = replica.server
        found = await await_hang(server, server.socket, lambda: self.core.settings.hang_timeout_s)
        replica.fault, replica.reason = "hung and was killed", f"the server hung and was killed: {found}"
        self.log.write("server hung", model=replica.name, reason=found)
        server.kill()

    async def _change_tier(self, model: str, tier: str, reason: str) -> None:
        """Put the server into a sleeping tier. Stop it for any other tier, or if it does not reach this one."""
        await self._cancel_replacement(model)
        if (replica := self.replicas.get(model)) is None:
            self.emit(events.TierChanged(model))
            return
        failed = None if tier == STOPPED else await self._try(replica.sleep(tier))
        if tier == STOPPED or failed is not None:
            self.log.write("stop", model=replica.name, tier=tier, reason=reason, error=failed)
            await replica.stop()
            return
        self.log.write("sleep", model=replica.name, tier=tier, reason=reason)
        self.facts.get_model(replica.name).gpu_memory_bytes = None
        self.emit(events.TierChanged(replica.name))
        self._retire_if_outdated(replica.launch)

    async def _try(self, work: Awaitable[None]) -> str | None:
        """Return why `work` failed or did not end in time, or None if it succeeded."""
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await work
        except TimeoutError:
            return f"the server did not respond within {self._ready_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - of the connection, the response, or the driver
            return str(error) or type(error).__name__
        return None

    async def _wake(self, replica: LocalReplica, tier: str) -> None:
        began = self.clock()
        if (failed := await self._try(replica.wake())) is None:
            replica.start_s = self.clock() - began
            # The phases and fallbacks in the ready file belong to the start, not to this wake-up.
            document = {"fallbacks": fallback.encode(replica.fallbacks)}
            self._report_ready(replica, replace(replica.ready, document=document), tier)
            return
        replica.start_s, replica.reason = 0.0, f"the server did not wake up: {failed}"
        self._record_failed_start(replica.name, replica.reason, self.clock() - began)
        await replica.stop()

    def _report_ready(
        self, replica: LocalReplica, ready: ReadyServer, mode: str, replaced: LocalReplica | None = None
    ) -> None:
        self.record.record_start(replica.name, ready, mode, replica.start_s)
        if replaced is None:
            self.emit(events.ModelReady(replica.name, replica.start_s))
        self._retire_if_outdated(replica.launch)

    def _record_failed_start(self, model: str, reason: str, seconds: float) -> None:
        if not self.facts.stopping:
            self.record.record_failed_start(model, reason, seconds)

    def _retire_if_outdated(self, launch: Launch) -> None:
        now = self.launches.get(launch.name)
        if now is None or now.server_identity == launch.server_identity:
            return
        ordered = self._ordered.get(launch.name)
        if ordered is not None and ordered.server_identity == now.server_identity:
            return
        # Requests with the new names go to the current server while its replacement starts.
        is_replaceable = set(now.names()) == set(launch.names()) and now.devices == launch.devices
        self.emit(events.ServerOutdated(launch.name, is_replaceable=is_replaceable))

    def begin(self) -> None:
        """Start the runtime template if the settings require it."""
        self.template.configure(self.launches.values(), self.core.settings)

    def configure(self, launches: Mapping[str, Launch]) -> None:
        """Apply new launch specifications and the core's settings, and retire servers whose arguments are outdated."""
        self.launches = launches
        for name, replica in list(self.replicas.items()):
            if self.core.models[name].state is not ModelState.STARTING:
                self._retire_if_outdated(replica.launch)
        self.begin()

    def drain(self) -> None:
        """Stop the servers that are still starting, and do not start another template."""
        for name, model in list(self.core.models.items()):
            if model.state is ModelState.STARTING and name in self.replicas:
                self._tasks.spawn(self.replicas[name].stop())
        for name in {one.name for one in self.others}:
            self._tasks.spawn(self._cancel_replacement(name))
        self.template.drain()

    def kill(self) -> None:
        """Stop every server immediately."""
        for replica in (*self.replicas.values(), *self.others):
            replica.is_ending = True
            replica.server.stop()
            replica.server.stop()

    async def close(self) -> None:
        """Wait until every server and the template have exited."""
        await self._tasks.wait()
        await self.template.close()
        await self.servers.close()
