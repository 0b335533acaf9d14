"""Start mode `runtime-snapshot`: CRIU thaws a process with vLLM imported, which forks a server of any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldstart.errors import UsageError
from coldstart.launch.modes.mode import LaunchRefusedError, Reason
from coldstart.launch.modes.thawing import launch_thawed
from coldstart.system import runtime

if TYPE_CHECKING:
    from coldstart.launch.process_snapshot import Thawed
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running

_ON_GPU = Reason(
    "freezing a runtime that has queried the GPU driver was never tested",
    "coldstart template start MODEL --level runtime",
)
_FREEZE = "coldstart template freeze"


class RuntimeSnapshotMode:
    """Start from the process image of this machine's runtime, which contains no model."""

    name = "runtime-snapshot"
    loads_weights = True
    repeatable = True
    probes = ("criu",)

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason as specified by StartMode."""
        if not runtime.targets_cpu():
            return _ON_GPU
        if start is None or _image_exists(start):
            return None
        return Reason("no runtime snapshot exists on this machine", _FREEZE)

    def launch(self, start: ServerStart) -> Running:
        """Thaw the runtime and have it fork the server, as specified by StartMode."""
        return launch_thawed(start, _thaw)


def _image_exists(start: ServerStart) -> bool:
    from coldstart.launch import runtime_snapshot

    try:
        return runtime_snapshot.find_image(start.request.lookup.cache) is not None
    except (UsageError, OSError) as error:
        raise LaunchRefusedError(str(error)) from error


def _thaw(start: ServerStart) -> Thawed:
    from coldstart.launch import process_snapshot, runtime_snapshot

    image = runtime_snapshot.find_image(start.request.lookup.cache)
    if image is None:
        raise LaunchRefusedError("the frozen runtime was removed", _FREEZE)
    try:
        return runtime_snapshot.thaw(image, start.plan)
    except process_snapshot.SnapshotUnusableError as error:
        raise LaunchRefusedError(str(error), error.hint or _FREEZE) from error


RUNTIME_SNAPSHOT = RuntimeSnapshotMode()
