"""Source and plan of the weights of a server, which are part of its launch plan.

The launch plan contains a `WeightsRequest` because every vLLM process can read the plan, and vLLM rejects unknown keys in
its loader's extra configuration. Without this request, the server loads the weights from the model's own directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.artifacts import canonical


class LostWeightsError(RuntimeError):
    """Error for a server whose requested weights source failed. A start without this source may succeed."""


@dataclass(frozen=True)
class LimitedFetch:
    """Named weight fetch with a rate limit in bytes per second (None: no limit), which can change during the fetch.

    A `background` fetch runs only while no other fetch runs on this machine. With `frees_loaded`, the prefetcher frees each
    tensor as soon as the server has loaded it; a later server fetches it again. While no server waits for bytes, the fetch
    pauses when the prefetcher holds `most_held_bytes` (None: no limit).
    """

    name: str
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    background: bool = False
    frees_loaded: bool = False
    most_held_bytes: int | None = None


@dataclass(frozen=True)
class WeightsRequest:
    """Source of weights (http://, s3://, hf:// or a directory), path of the weights plan, and an optional rate limit."""

    source: str
    plan: Path
    rate_limit: LimitedFetch | None = None

    def read(self) -> dict[str, Any]:
        """Read the weights plan. Raises OSError, and ValueError if the file does not contain a JSON object."""
        plan = canonical.read_json(self.plan)
        if not isinstance(plan, dict):
            raise ValueError(f"invalid weights plan {self.plan.name}: expected a JSON object")
        return plan
