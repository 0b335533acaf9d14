"""Launch plan: the complete input of one server start, as plain data that crosses process boundaries.

The launcher, the template and the server processes read the plan, some before they import torch. If a bundle section is
missing or unusable, its field is None and `fallbacks` gives the reason.
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

READY_FD_ENV = environment.READY_FD


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of one server start.

    - `vllm_args`: arguments of `vllm serve`, including the model.
    - `key`, `weights`: digests of the configuration and the weights; a prebuilt worker is used only if both match.
    - `compile_dir`: directory of the unpacked `compile` section.
    - `canary`: prompt token IDs, their reference output tokens, and optionally the output of a `batch` of such requests.
    - `env`: environment variables to set before vLLM is imported.
    - `weights_from`: source of the weights; None for the model's own directory.
    - `engine`: extra work of the engine processes.
    - `must_adopt`: exit with a reason if the prebuilt worker cannot be used, instead of building another one.
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
        """Build a plan from a JSON object. Raises ValueError if a field is missing or has a wrong type."""
        try:
            return msgspec.convert(document, cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise ValueError(f"invalid launch plan: {error}") from error

    @classmethod
    def parse(cls, text: str) -> LaunchPlan:
        """Build a plan from JSON text. Raises ValueError if the text is not a valid plan."""
        return cls.parse_document(json.loads(text))

    def variables(self) -> dict[str, str]:
        """Return the environment variables for each process of the server, including the serialized plan."""
        return self.env | {environment.PLAN: json.dumps(self.document(), sort_keys=True)}

    def install(self) -> None:
        """Set the plan's variables in the environment of this process, which its child processes inherit.

        Variables that Kubernetes injects for a service named vllm are removed, because vLLM rejects an address in
        VLLM_PORT.
        """
        environment.drop_service_variables(os.environ, "VLLM_")
        os.environ.update(self.variables())

    @classmethod
    def current(cls) -> LaunchPlan:
        """Return the plan in this process's environment, or an empty plan if coldstart did not start the process."""
        text = environment.PLAN.read()
        return cls.parse(text) if text else cls(Arguments())


RUNTIME, ENGINE, PARKED = "runtime", "engine", "parked"
SLEEP_LEVELS = {"asleep-1": 1, "asleep-2": 2, PARKED: 1}
"""Sleep levels of vLLM, by template level."""
LEVELS = (RUNTIME, ENGINE, *SLEEP_LEVELS)
