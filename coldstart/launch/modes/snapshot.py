"""Start mode `snapshot`: CRIU thaws an engine that was built from the bundle and frozen here, which forks the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coldstart.launch.modes.mode import Reason
from coldstart.launch.modes.thawing import launch_thawed
from coldstart.system import runtime

if TYPE_CHECKING:
    from coldstart.launch.process_snapshot import Thawed
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running

_ON_GPU = Reason(
    "a CRIU image of a forked template holds no CUDA state",
    "use vLLM's snapshots (one GPU, same host and device, root): vllm snapshot create MODEL --revision COMMIT",
)


class SnapshotMode:
    """Start from the process image of a bundle's engine, weights included."""

    name = "snapshot"
    loads_weights = False
    repeatable = True
    probes = ("criu",)

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason as specified by StartMode."""
        if not runtime.targets_cpu():
            return _ON_GPU
        if start is None:
            return None
        from coldstart.system.snapshot import runtime_image

        lookup = start.request.lookup
        if lookup.bundle and runtime_image.engine_place(lookup.cache.runtimes, lookup.bundle.digest).is_dir():
            return None
        return Reason("the bundle has no snapshot", lookup.format_materialize("--snapshot"))

    def launch(self, start: ServerStart) -> Running:
        """Thaw the engine and have it fork the server, as specified by StartMode."""
        return launch_thawed(replace(start, plan=replace(start.plan, must_adopt=True)), _thaw)


def _thaw(start: ServerStart) -> Thawed:
    from coldstart.launch import process_snapshot

    lookup = start.request.lookup
    assert lookup.bundle is not None, "unavailable() was not asked"
    return process_snapshot.thaw(lookup.bundle, start.plan, lookup.cache, start.request.trust)


SNAPSHOT = SnapshotMode()
