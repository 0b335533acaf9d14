"""Launch plan: all data that one server start needs, as plain data that crosses process boundaries.

The launcher, the template and the executor read it, some of them before anything heavy is imported. A section that is
missing or unusable is None here, with the reason in `fallbacks`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import EngineTask
from coldstart.contract.weights import WeightsRequest

PLAN_ENV = environment.PLAN
READY_FD_ENV = environment.READY_FD


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of one start of one server.

    - `vllm_args`: vLLM's serve arguments, including the model.
    - `key`, `weights`: digests of the configuration and the weights; a built worker is adopted only if both are equal.
    - `compile_dir`: an unpacked `compile` section.
    - `canary`: prompt token ids, the greedy tokens that must follow, and, if known, those that follow in a `batch` of requests.
    - `env`: variables that are set before vLLM is imported.
    - `weights_from`: source of the weights, None for the model's own directory.
    - `engine`: work of the engine's processes besides serving.
    - `must_adopt`: exit with a reason if the built worker cannot be adopted, instead of building another.
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
        # Some callers pass a plain list.
        object.__setattr__(self, "vllm_args", Arguments(self.vllm_args))

    def document(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return dict(msgspec.to_builtins(self, enc_hook=str))

    @classmethod
    def parse_document(cls, document: object) -> LaunchPlan:
        """Parse the result of `document`. Raises ValueError if members are missing or have other types."""
        try:
            return msgspec.convert(document, cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise ValueError(f"invalid launch plan: {error}") from error

    @classmethod
    def parse(cls, text: str) -> LaunchPlan:
        """Parse the JSON text of `document`. Raises ValueError if `parse_document` does."""
        return cls.parse_document(json.loads(text))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of every process of the server: the plan's own, and the plan itself."""
        return self.env | {PLAN_ENV: json.dumps(self.document(), sort_keys=True)}

    def install(self) -> None:
        """Set the plan's variables in the environment of this process and of every process that it forks.

        Variables that Kubernetes sets for a service named vllm are dropped: vLLM rejects an address in VLLM_PORT.
        """
        environment.drop_service_variables(os.environ, "VLLM_")
        os.environ.update(self.variables())

    @classmethod
    def current(cls) -> LaunchPlan:
        """Return the plan that this process was started with; an empty plan if plain vLLM started it."""
        text = PLAN_ENV.read()
        return cls.parse(text) if text else cls(Arguments())


RUNTIME, ENGINE, PARKED = "runtime", "engine", "parked"
SLEEP_LEVELS = {"asleep-1": 1, "asleep-2": 2, PARKED: 1}
"""Sleep levels of vLLM, by template level."""
LEVELS = (RUNTIME, ENGINE, *SLEEP_LEVELS)
