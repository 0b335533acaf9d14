"""Where the weights come from and by which plan, as the launch plan tells every process of a server.

The launch plan, because it reaches whatever process vLLM starts, and because vLLM refuses keys of its loader's extra
configuration that it does not know. Without a request the files of the model's own directory are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PacedFetch:
    """The name of a fetch whose `rate` (bytes/s, None: all there is) somebody sets, and may change while it runs.

    In the `background`: while nothing else is fetched on this machine.
    """

    name: str
    rate: float | None = None
    background: bool = False


@dataclass(frozen=True)
class WeightsRequest:
    """A source (http://, s3://, hf:// or a directory) and the file that holds the weights plan.

    By `pace`, where there is one.
    """

    source: str
    plan: Path
    pace: PacedFetch | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", Path(self.plan))  # it comes from JSON as text
        if isinstance(self.pace, Mapping):
            object.__setattr__(self, "pace", PacedFetch(**self.pace))

    def read(self) -> dict[str, Any]:
        """The plan. Raises OSError, and ValueError for what is no JSON object."""
        found = json.loads(self.plan.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{self.plan.name} is no weights plan")
        return found
