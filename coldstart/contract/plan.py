"""What one server start needs, as plain data that crosses process boundaries.

Standard library only: the launcher, the template and the executor all read it, some of them before anything
heavy is imported. A section that is absent or unusable is simply None here, with its reason in `fallbacks`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from coldstart.contract import environment, fallback
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import EngineTask
from coldstart.contract.weights import WeightsRequest

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
    a `batch` of several. `env` is set before vLLM is imported. `weights_from` is where the weights are fetched from (None: the
    model's own directory), `engine` what the engine's processes do beside serving.
    With `must_adopt` a server that cannot take over the built worker ends, saying why, and builds none.
    """

    vllm_args: Arguments
    key: str = ""
    weights: str = ""
    compile_dir: str | None = None
    canary: dict[str, list[int]] | None = None
    env: dict[str, str] = field(default_factory=dict)
    weights_from: WeightsRequest | None = None
    engine: EngineTask = field(default_factory=EngineTask)
    fallbacks: list[Fallback] = field(default_factory=list)
    must_adopt: bool = False

    def __post_init__(self) -> None:
        # A plan that comes from JSON, or is written down as a list of words.
        object.__setattr__(self, "vllm_args", Arguments(self.vllm_args))

    def document(self) -> dict[str, Any]:
        """The JSON object."""
        plain = asdict(self, dict_factory=_plain)
        return plain | {"vllm_args": list(self.vllm_args), "fallbacks": fallback.to_json(self.fallbacks)}

    @classmethod
    def of(cls, document: object) -> LaunchPlan:
        """Inverse of `document`. Raises ValueError for what another release has written: nothing of a plan may be lost."""
        given = _members(cls, document, "launch plan")
        if (request := given["weights_from"]) is not None:
            given["weights_from"] = WeightsRequest(**_members(WeightsRequest, request, "weights request"))
        given["fallbacks"] = fallback.from_json(given["fallbacks"])
        given["engine"] = EngineTask(**_members(EngineTask, given["engine"], "engine task"))
        return cls(**given)

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Inverse of `document` through JSON. Raises ValueError as `of`."""
        return cls.of(json.loads(text))

    def variables(self) -> dict[str, str]:
        """What every process of the server has in its environment: the plan's own variables, and the plan."""
        return self.env | {PLAN_ENV: json.dumps(self.document(), sort_keys=True)}

    def install(self) -> None:
        """Make this the process's plan: its environment, and itself for every process forked from here."""
        os.environ.update(self.variables())

    @classmethod
    def current(cls) -> LaunchPlan:
        """The plan this process was started with; an empty one under an ordinary vLLM."""
        text = PLAN_ENV.read()
        return cls.from_json(text) if text else cls(Arguments())

    def save(self, path: Path) -> None:
        """Write the plan for a process that is started with its path."""
        path.write_text(json.dumps(self.document()))


def _plain(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in members}


def _members(kind: type[Any], document: object, what: str) -> dict[str, Any]:
    """The members of a JSON object that has exactly those of `kind`. Raises ValueError naming the others."""
    if not isinstance(document, Mapping):
        raise ValueError(f"the {what} is no JSON object")
    if differing := sorted({member.name for member in fields(kind)} ^ {*document}):
        raise ValueError(
            f"the {what} is of another release of coldstart: only one knows {', '.join(differing)}"
        )
    return dict(document)
