"""Progress of a start, for clients that wait for it.

The estimate is the start time of the bundle or the host file, corrected by measured starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from coldstart.host.model_state import Model, State
from coldstart.system.start_progress import StartProgress

# An estimate that is used up does not mean that the model is ready.
_MOST = 0.99


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a model that a request waits for.

    `fraction` is the part of the start that has passed; `eta_s` the seconds until it is ready; `step` what the starting
    server itself reports, as JSON data. None: unknown.
    """

    model: str
    stage: str
    fraction: float | None = None
    eta_s: float | None = None
    step: Mapping[str, Any] | None = None

    def encode(self) -> str:
        """Return the progress as one line of JSON."""
        return json.dumps(asdict(self))


def estimate_progress(model: Model, now: float, reported: StartProgress | None = None) -> Progress:
    """Return the progress of a model at the time `now`, in seconds. `reported` is what its starting server reports."""
    name, stage = model.spec.name, str(model.state)
    step = reported.build_document() if reported else None
    if model.state is State.READY:
        return Progress(name, stage, 1.0, 0.0)
    if model.state is not State.STARTING:
        # How long other models take for their requests is not known.
        return Progress(name, stage, 0.0)
    passed, total = now - (model.entered or 0.0), model.observed.penalty_s(model.tier)
    if passed >= total:
        return Progress(name, stage, _MOST, step=step)
    return Progress(name, stage, round(min(_MOST, passed / total), 3), round(total - passed, 1), step)
