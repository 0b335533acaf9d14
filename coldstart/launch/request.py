"""The request for one start of a server, and the state of a start that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.contract.weights import PacedFetch
from coldstart.launch.scheduler import STOCK
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.scheduling.settings import SchedulerSettings

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Trust
    from coldstart.contract.plan import LaunchPlan


@dataclass(frozen=True)
class ServeRequest:
    """What the user asked for, and the bundle that was found for it.

    `listen` are vLLM's host and port arguments, `mode` is the name of a start mode or "auto", `without_bundle` starts vLLM's
    ordinary way where there is no bundle, `trust` judges whose code may run here; with `require_signature` a bundle it does not
    accept is refused as a whole, otherwise only its code is left alone. `weights_from` is where the weights are fetched from
    (None: the model's own directory), by `weights_pace` if there is one; with `fetch_rest` those that this node's pipeline
    ranks do not need follow in the background. `templates` is a directory of further templates.
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
    fetch_rest: bool = False
    templates: Path | None = None


@dataclass(frozen=True)
class ServerStart:
    """One start that is under way: its request, its launch plan, and CLOCK_MONOTONIC at its begin in seconds."""

    request: ServeRequest
    plan: LaunchPlan
    began: float
