"""Start mode `snapshot`: CRIU thaws the bundle's built engine, which forks the server."""

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
    from coldstart.launch.ttft import StartCosts

_ON_GPU = Reason(
    "a CRIU image of a forked template holds no CUDA state",
    "vllm snapshot create MODEL --revision COMMIT, vLLM's own (one GPU, same host and device, root)",
)
_NOT_MADE = Reason("the bundle has no snapshot", "coldstart materialize MODEL --snapshot")


class SnapshotMode:
    """A process image of one bundle's engine, its weights included."""

    name = "snapshot"
    loads_weights = False
    repeatable = True
    probes = ("criu",)

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """As StartMode."""
        if not runtime.targets_cpu():
            return _ON_GPU
        bundle = start.request.lookup.bundle if start else None
        return None if start is None or (bundle and bundle.has(self.name)) else _NOT_MADE

    def launch(self, start: ServerStart) -> Running:
        """As StartMode."""
        return launch_thawed(replace(start, plan=replace(start.plan, must_adopt=True)), _thaw)

    def remaining(self, costs: StartCosts) -> StartCosts | None:
        """Return None: the image has the weights."""
        return None


def _thaw(start: ServerStart) -> Thawed:
    from coldstart.launch import process_snapshot

    lookup = start.request.lookup
    assert lookup.bundle is not None, "unavailable() was not asked"
    return process_snapshot.thaw(lookup.bundle, start.plan, lookup.cache, start.request.trust)


SNAPSHOT = SnapshotMode()
