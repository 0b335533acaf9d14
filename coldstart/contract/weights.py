"""Where the weights come from and by which plan, as the launch plan tells every process of a server.

The launch plan, because it reaches whatever process vLLM starts, and because vLLM refuses keys of its loader's extra
configuration that it does not know. Without a request the files of the model's own directory are loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WeightsRequest:
    """A source (http://, s3://, hf:// or a directory) and the file that holds the weights plan."""

    source: str
    plan: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", Path(self.plan))  # it comes from JSON as text

    def read(self) -> dict[str, Any]:
        """The plan. Raises OSError, and ValueError for what is no JSON object."""
        found = json.loads(self.plan.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{self.plan.name} is no weights plan")
        return found
