"""Start modes. `LADDER` lists them in the order in which `--mode auto` tries them.

Commands import this module for the mode names, so its functions import the dependencies of a start only when needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coldstart.contract.plan import ENGINE, PARKED, RUNTIME, SLEEP_LEVELS
from coldstart.errors import LaunchRefusedError, UsageError
from coldstart.system import runtime

if TYPE_CHECKING:
    from coldstart.launch.planning import ServerStart
    from coldstart.launch.server_process import ReadyServer, RestoredTemplate, ServerProcess
    from coldstart.launch.template_pool import RunningTemplate
    from coldstart.system.probes import Probe

AUTO = "auto"
CPU, GPU = "cpu", "gpu"
_FREEZE = "coldstart template freeze"


@dataclass(frozen=True)
class Reason:
    """Reason why a start mode cannot be used, with a hint for the user."""

    reason: str
    hint: str


@dataclass(eq=False)
class StartMode:
    """A way to start a server. To add a mode, implement `launch` in a subclass and add an instance to `LADDER`.

    Attributes:
        name: Value of `--mode`.
        loads_weights: Whether the server loads its weights itself, so that an early fetch helps.
        probes: Names of the `coldstart doctor` probes that must succeed.
        cpu_limit: Reason why vLLM's CPU build does not support the mode, or None if it does.
        gpu_limit: Reason why vLLM's GPU build does not support the mode, or None if it does.
        is_repeatable: Whether one preparation serves any number of servers at a time, as a host requires.
        auto_on: vLLM builds with which `--mode auto` tries the mode. Elsewhere the mode is used only on request. If there
            are none, or the mode is not repeatable, `bench` too measures the mode only on request.
        preparation: Arguments of `coldstart template` with which `bench` prepares the mode. MODEL stands for the model.
    """

    name: str
    loads_weights: bool = True
    probes: tuple[str, ...] = ()
    cpu_limit: Reason | None = None
    gpu_limit: Reason | None = None
    is_repeatable: bool = True
    auto_on: tuple[str, ...] = (CPU, GPU)
    preparation: tuple[str, ...] = ()

    def find_unusable_reason(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason why this machine or vLLM build does not support the mode, or None if it does.

        If `start` is given, also check its bundle and templates.

        Raises:
            LaunchRefusedError: The check failed.
        """
        here = self.cpu_limit if runtime.targets_cpu() else self.gpu_limit
        return here if here is not None or start is None else self.find_missing_requirement(start)

    def find_missing_requirement(self, start: ServerStart) -> Reason | None:
        """Return why this start cannot use the mode, such as a missing template, or None. Raises LaunchRefusedError."""
        return None

    def launch(self, start: ServerStart) -> ReadyServer:
        """Start the server and wait until it is ready.

        Raises:
            LaunchRefusedError, PeerError, BundleError: This mode cannot be used now.
            ServerExitedError: The server exits before it is ready.
            CommandFailedError: The server is not ready in time.
        """
        raise NotImplementedError


def await_ready(start: ServerStart, launched: tuple[ServerProcess, int]) -> ReadyServer:
    """Wait until the launched server is ready, and kill it if an exception is raised.

    Raises:
        ServerExitedError: The server exits before it is ready.
        CommandFailedError: The server is not ready in time.
    """
    from coldstart.launch import server, server_process

    process, reader = launched
    with server.stop_on_error(process):
        start.request.on_process_start(process.pid)
        request = start.request
        return server_process.await_readiness(
            process, reader, start.began, request.ready_timeout, request.on_progress
        )


class FreshMode(StartMode):
    """Mode that starts a new process, which imports, loads and builds everything itself. It is always available."""

    def launch(self, start: ServerStart) -> ReadyServer:
        """Start the server in a new process. Raises the errors of `StartMode.launch`."""
        from coldstart.launch import server_process

        return await_ready(start, server_process.start_fresh(start.plan))


@dataclass(eq=False)
class TemplateMode(StartMode):
    """Mode that starts a server from a template: the template forks the server, or its sleeping engine wakes up as the server.

    A template that is not ready yet counts as available.
    """

    levels: tuple[str, ...] = ()

    def find_missing_requirement(self, start: ServerStart) -> Reason | None:
        """Return the reason why no template fits this start, or None if a template fits."""
        listed = _list_templates(start)
        if self._select_fitting(listed, start):
            return None
        model = start.request.lookup.model.name
        reason = f"no {self.name} is running for {model}"
        if any(template.model == model and template.level in self.levels for template in listed):
            reason = f"the running {self.name} for {model} was started with other arguments or versions"
        return Reason(reason, start.request.lookup.format_template_command(self.levels[0]))

    def launch(self, start: ServerStart) -> ReadyServer:
        """Make the template fork the server, or wake its engine to act as one. Raises the same errors as `StartMode.launch`."""
        from coldstart.launch import server_process, template_pool

        found = self._select_fitting(_list_templates(start), start)
        ready = [one for one in found if one.ready]
        if not ready:
            if found and found[0].pid:
                raise LaunchRefusedError(f"the {self.name} of {found[0].model} is not ready yet")
            raise LaunchRefusedError(
                f"the {self.name} of {start.request.lookup.model.name} has exited", "coldstart template stop"
            )
        template = ready[0]

        def require_compatible() -> None:
            if (reason := template_pool.find_incompatibility(template, start.plan)) is not None:
                raise LaunchRefusedError(reason, "run `coldstart template stop`, then start a new template")

        try:
            launched = server_process.fork_server(start.plan, template.socket, check=require_compatible)
        except server_process.TemplateHungError as error:
            template_pool.discard_template(template)
            raise LaunchRefusedError(str(error), "coldstart template status") from error
        return await_ready(start, launched)

    def _select_fitting(self, listed: Sequence[RunningTemplate], start: ServerStart) -> list[RunningTemplate]:
        lookup = start.request.lookup
        fitting = [
            template
            for template in listed
            if template.python == sys.executable
            and (template.level == RUNTIME or template.key == lookup.key.digest)
        ]
        return [template for level in self.levels for template in fitting if template.level == level]


def _list_templates(start: ServerStart) -> list[RunningTemplate]:
    """Return the templates that a start can see. Raises LaunchRefusedError if their directory is unavailable."""
    from coldstart.launch import template_pool

    roots = dict.fromkeys((start.request.templates, None))
    try:
        return [template for root in roots for template in template_pool.list_templates(root)]
    except (OSError, UsageError) as error:  # no private directory for sockets, or no space in it
        raise LaunchRefusedError(str(error)) from error


def _fork_thawed(start: ServerStart, thaw: Callable[[], RestoredTemplate]) -> ReadyServer:
    """Restore a template for this server only by calling `thaw`, and have it fork the server.

    Raises the errors of `StartMode.launch`.
    """
    from coldstart.launch import server_process

    try:
        thawed = thaw()
    except (UsageError, OSError, LookupError, ValueError, TypeError) as error:
        raise LaunchRefusedError(str(error)) from error
    try:
        launched = server_process.fork_server(start.plan, thawed.socket, thawed)
    except BaseException:
        thawed.end()
        raise
    return await_ready(start, launched)


class ParkedMode(TemplateMode):
    """Mode that starts a server from an engine whose GPU state the driver has moved to host memory."""

    def find_unusable_reason(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason why the mode is unavailable, such as a driver that is too old, or None."""
        if not runtime.targets_cpu():
            from coldstart.system.devices import nvml, parking

            if (limit := parking.find_limit(nvml.read_driver_version())) is not None:
                return Reason(*limit)
        return super().find_unusable_reason(start)


class SnapshotMode(StartMode):
    """Mode that restores a process image of the bundle's engine: a CRIU image on the CPU, a `vllm snapshot` on a GPU."""

    def find_unusable_reason(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason why the mode is unavailable, such as a missing tool for `vllm snapshot`, or None."""
        if not runtime.targets_cpu():
            from coldstart.vllm import gpu_starts

            if (limit := gpu_starts.find_missing_tool(os.environ, os.geteuid())) is not None:
                return Reason(*limit)
        return super().find_unusable_reason(start)

    def find_missing_requirement(self, start: ServerStart) -> Reason | None:
        """Return the reason why this start cannot use a snapshot of the bundle, or None if it can."""
        if not runtime.targets_cpu():
            from coldstart.launch import vllm_snapshot

            return (
                None if (limit := vllm_snapshot.find_missing_requirement(start)) is None else Reason(*limit)
            )
        from coldstart.system.snapshot import runtime_image

        lookup = start.request.lookup
        bundle, runtimes = lookup.bundle, lookup.cache.runtimes
        if bundle and runtime_image.choose_engine_image_directory(runtimes, bundle.digest).is_dir():
            return None
        return Reason("the bundle has no snapshot", lookup.format_command("materialize", "--snapshot"))

    def launch(self, start: ServerStart) -> ReadyServer:
        """Start the server from a restored template on the CPU, or with `vllm snapshot` on a GPU."""
        from coldstart.launch import process_snapshot, vllm_snapshot

        if not runtime.targets_cpu():
            return vllm_snapshot.restore_server(start)
        lookup, plan = start.request.lookup, replace(start.plan, must_adopt=True)
        bundle, trust = lookup.bundle, start.request.trust
        assert bundle is not None, "the caller did not check find_missing_requirement()"
        return _fork_thawed(
            replace(start, plan=plan), lambda: process_snapshot.thaw_engine(bundle, plan, lookup.cache, trust)
        )


class RuntimeSnapshotMode(StartMode):
    """Mode that restores a process image that contains the imported runtime but no model."""

    def find_missing_requirement(self, start: ServerStart) -> Reason | None:
        """Return a reason if this machine has no process image of the runtime, or None if it has one."""
        from coldstart.launch import process_snapshot

        try:
            exists = process_snapshot.find_runtime(start.request.lookup.cache) is not None
        except (UsageError, OSError) as error:
            raise LaunchRefusedError(str(error)) from error
        return None if exists else Reason("no runtime snapshot exists on this machine", _FREEZE)

    def launch(self, start: ServerStart) -> ReadyServer:
        """Restore the runtime template, and make it fork the server."""
        from coldstart.launch import process_snapshot

        def thaw() -> RestoredTemplate:
            image = process_snapshot.find_runtime(start.request.lookup.cache)
            if image is None:
                raise LaunchRefusedError("the runtime snapshot was removed during the start", _FREEZE)
            return process_snapshot.restore_template(image, start.plan)

        try:
            return _fork_thawed(start, thaw)
        except LaunchRefusedError as error:
            raise LaunchRefusedError(str(error), error.hint or _FREEZE) from error


_NO_SLEEP = Reason(
    "vLLM's sleep mode requires a GPU: the CPU build would free no memory",
    "use the mode template-engine: run `coldstart template start MODEL --level engine`",
)
STANDBY = TemplateMode(
    "standby",
    loads_weights=False,
    cpu_limit=_NO_SLEEP,
    is_repeatable=False,  # a sleeping engine becomes one server at a time
    levels=tuple(level for level in SLEEP_LEVELS if level != PARKED),
    preparation=("start", "MODEL", "--level", "asleep-1"),
)
PARKED_ENGINE = ParkedMode(
    "parked",
    loads_weights=False,
    cpu_limit=_NO_SLEEP,
    is_repeatable=False,
    levels=(PARKED,),
    preparation=("start", "MODEL", "--level", PARKED),
)
TEMPLATE_ENGINE = TemplateMode(
    "template-engine",
    loads_weights=False,
    probes=("template",),
    gpu_limit=Reason(
        "a built GPU engine cannot be forked: CUDA does not survive a fork",
        "run `coldstart template start MODEL --level runtime`, which forks before CUDA is initialized",
    ),
    levels=(ENGINE,),
    preparation=("start", "MODEL", "--level", ENGINE),
)
SNAPSHOT = SnapshotMode(
    "snapshot",
    loads_weights=False,
    probes=("criu",),
    # `vllm snapshot` is untested. On a GPU it would come after a runtime template, which serves any number of servers.
    auto_on=(CPU,),
)
TEMPLATE_RUNTIME = TemplateMode(
    "template-runtime",
    probes=("template",),
    levels=(RUNTIME,),
    preparation=("start", "MODEL", "--level", RUNTIME),
)
RUNTIME_SNAPSHOT = RuntimeSnapshotMode(
    "runtime-snapshot",
    probes=("criu",),
    gpu_limit=Reason(
        "coldstart does not freeze a runtime of a GPU build, because it has queried the GPU driver",
        "coldstart template start MODEL --level runtime",
    ),
    preparation=("freeze",),
)
FRESH = FreshMode("fresh")
LADDER: list[StartMode] = [
    STANDBY, PARKED_ENGINE, TEMPLATE_ENGINE, SNAPSHOT, TEMPLATE_RUNTIME, RUNTIME_SNAPSHOT, FRESH,
]  # fmt: skip


def list_mode_names() -> tuple[str, ...]:
    """Return the names of all start modes, fastest first."""
    return tuple(mode.name for mode in LADDER)


def list_modes_to_try(name: str) -> list[StartMode]:
    """Return the modes to try for `--mode NAME`, in order. The last mode is always `fresh`.

    Raises KeyError if the name is unknown.
    """
    if name == AUTO:
        build = CPU if runtime.targets_cpu() else GPU
        return [mode for mode in LADDER if build in mode.auto_on]
    known = {mode.name: mode for mode in LADDER}
    return list(dict.fromkeys((known[name], FRESH)))


def check_modes(results: Sequence[Probe]) -> dict[str, bool]:
    """Return, by mode name, whether a machine with these probe results can start servers in that mode."""
    from coldstart.system import probes

    good = {probe.name for probe in results if probe.status == "ok"}
    able = probes.can_serve(results)
    return {
        mode.name: able and not mode.find_unusable_reason() and good.issuperset(mode.probes)
        for mode in LADDER
    }


def list_unusable_modes() -> dict[str, Reason]:
    """Return the reason why a mode cannot run here, by mode name. Modes that can are omitted."""
    return {mode.name: why for mode in LADDER if (why := mode.find_unusable_reason()) is not None}


def find_criu_limit(mode: StartMode) -> Reason | None:
    """Return the reason why CRIU cannot run here if the mode needs it, with the hint of `coldstart doctor`, or None."""
    from coldstart.system import probes

    if (
        "criu" not in mode.probes
        or not runtime.targets_cpu()
        or (checked := probes.probe_criu()).status == "ok"
    ):
        return None
    return Reason(f"CRIU cannot run: {checked.found}", checked.hint or "")
