"""Source and plan of the weights, as part of the launch plan that every process of a server reads.

The launch plan carries them because every process that vLLM starts can read it, and because vLLM rejects unknown keys in
its loader's extra configuration. Without a request the server loads the files in the model's own directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.artifacts import canonical

# With this the error of a server begins that could not load the weights of its request.
LOST = "cannot load the weights: "


@dataclass(frozen=True)
class PacedFetch:
    """A named fetch with a `rate` in bytes per second (None without limit), which the caller can change while it runs.

    A `background` fetch runs only while no other fetch runs on this machine.
    """

    name: str
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    background: bool = False


@dataclass(frozen=True)
class WeightsRequest:
    """A source (http://, s3://, hf:// or a directory), the file of the weights plan, and the pace of the fetch, if limited."""

    source: str
    plan: Path
    pace: PacedFetch | None = None

    def read(self) -> dict[str, Any]:
        """Read the weights plan. Raises OSError, and ValueError if the file does not contain a JSON object."""
        found = canonical.read_json(self.plan)
        if not isinstance(found, dict):
            raise ValueError(f"invalid weights plan {self.plan.name}: expected a JSON object")
        return found
