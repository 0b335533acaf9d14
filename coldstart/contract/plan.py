"""What one server start needs, as plain data that crosses process boundaries.

Standard library only: the launcher, the template and the executor all read it, some of them before anything
heavy is imported. A section that is absent or unusable is simply None here, with its reason in `fallbacks`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments

PLAN_ENV = environment.PLAN
READY_FD_ENV = environment.READY_FD
CANARY_BATCH = 4
"""How many requests at once the canary's `batch` tokens answer."""


@dataclass(frozen=True)
class LaunchPlan:
    """One start of one server.

    `vllm_args` are vLLM's own serve arguments, the model included. `key` and `weights` (digests) say for what the
    state was made: a built worker is adopted only for the same two. `compile_dir` is an unpacked `compile` section.
    `canary` holds prompt token ids, the greedy tokens that must follow them, and, where it is known, what must follow in
    a `batch` of several. `env` is set before vLLM is imported.
    With `must_adopt` a server that cannot take over the built worker ends, saying why, and builds none.
    """

    vllm_args: Arguments
    key: str = ""
    weights: str = ""
    compile_dir: str | None = None
    canary: dict[str, list[int]] | None = None
    env: dict[str, str] = field(default_factory=dict)
    fallbacks: list[dict[str, str]] = field(default_factory=list)
    must_adopt: bool = False

    def __post_init__(self) -> None:
        # A plan that comes from JSON, or is written down as a list of words.
        object.__setattr__(self, "vllm_args", Arguments(self.vllm_args))

    def document(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self) | {"vllm_args": list(self.vllm_args)}

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Inverse of `document` through JSON."""
        return cls(**json.loads(text))

    def install(self) -> None:
        """Make this the process's plan: its environment, and itself for every process forked from here."""
        os.environ.update(self.env)
        os.environ[PLAN_ENV] = json.dumps(self.document(), sort_keys=True)

    @classmethod
    def current(cls) -> LaunchPlan:
        """The plan this process was started with; an empty one under an ordinary vLLM."""
        text = PLAN_ENV.read()
        return cls.from_json(text) if text else cls(Arguments())

    def save(self, path: Path) -> None:
        """Write the plan for a process that is started with its path."""
        path.write_text(json.dumps(self.document()))
