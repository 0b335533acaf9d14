"""Request for one start of a server, and the state of a start that is in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.contract.weights import PacedFetch
from coldstart.launch.scheduler import STOCK
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import start_progress

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Trust
    from coldstart.contract.plan import LaunchPlan


@dataclass(frozen=True)
class ServeRequest:
    """Start options of the user, and the bundle that was found for them.

    - `listen`: vLLM's host and port arguments.
    - `mode`: name of a start mode, or "auto".
    - `without_bundle`: start vLLM the ordinary way if no bundle is found.
    - `ready_timeout`: seconds until the server must be ready, None without limit.
    - `trust`: judges which bundles may provide code. With `require_signature`, a bundle that it rejects is refused completely;
      otherwise only the bundle's code is ignored.
    - `weights_from`: source of the weights, None for the model's own directory. `weights_pace` limits the rate.
    - `defer_capture`: capture most CUDA graphs after the server is ready.
    - `fetch_rest`: fetch the weights that this node's pipeline ranks do not need in the background.
    - `templates`: directory of additional templates.
    - `observe`: called with the PID of each server process that the start creates.
    - `on_progress`: called with each report of a server about the progress of its start.
    """

    lookup: Lookup
    listen: Sequence[str] = ()
    mode: str = "auto"
    without_bundle: bool = False
    ready_timeout: float | None = None
    require_signature: bool = False
    scheduler: SchedulerSettings = STOCK
    trust: Trust = inspection.trust
    weights_from: str | None = None
    weights_pace: PacedFetch | None = None
    defer_capture: bool = False
    fetch_rest: bool = False
    templates: Path | None = None
    observe: Callable[[int], None] = lambda pid: None
    on_progress: start_progress.Report = start_progress.ignore


@dataclass(frozen=True)
class ServerStart:
    """A start in progress: its request, its launch plan, and its begin on CLOCK_MONOTONIC in seconds."""

    request: ServeRequest
    plan: LaunchPlan
    began: float
