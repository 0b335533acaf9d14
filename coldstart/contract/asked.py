"""Where the weights come from and by which plan, told to every process of a server through two environment variables.

The environment, because it reaches whatever process vLLM starts, and because vLLM refuses keys of its loader's
extra configuration that it does not know. Without them the files of the model's own directory are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.contract import environment

SOURCE_ENV = environment.WEIGHTS_FROM
PLAN_ENV = environment.WEIGHTS_PLAN


@dataclass(frozen=True)
class Asked:
    """A source (http://, s3://, hf:// or a directory) and the file that holds the weights plan."""

    source: str
    plan: Path

    def environment(self) -> dict[str, str]:
        """What the processes of the server must have in their environment."""
        return {SOURCE_ENV: self.source, PLAN_ENV: str(self.plan)}

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Asked | None:
        """Inverse of `environment`, None where it holds no request."""
        source, plan = SOURCE_ENV.read(variables), PLAN_ENV.read(variables)
        return cls(source, Path(plan)) if source and plan else None

    def read(self) -> dict[str, Any]:
        """The plan. Raises OSError, and ValueError for what is no JSON object."""
        found = json.loads(self.plan.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{self.plan.name} is no weights plan")
        return found
