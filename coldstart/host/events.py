"""Events that the host's core receives, and actions that it returns.

They are the only interface between the core and its two users, the live host and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.host.specification import HostSettings, ModelSpec, Tier


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request arrived. Its ID is unique.

    `is_client_request` is False if the request is an operator's order to start the model, which statistics and the eviction
    policy ignore.
    """

    request: str
    model: str
    is_client_request: bool = True


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A pending or running request completed or failed, or its client disconnected."""

    request: str


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model's server is ready, `start_s` seconds after its start was ordered."""

    model: str
    start_s: float


NO_BUNDLE = "no-bundle"


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a failure, in a form that processes can exchange: a message, and optionally a hint and an error code."""

    message: str
    hint: str = ""
    code: str = ""

    def __str__(self) -> str:
        code = f" [{self.code}]" if self.code and self.code != NO_BUNDLE else ""
        return f"{self.message}{code}" + (f" (hint: {self.hint})" if self.hint else "")


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """A start failed or a server process exited, and no process of the model remains.

    `has_external_cause` is True if the model is not the cause, for example because the process was killed. `reason`, `hint`
    and `code` are those of the `Failure`.
    """

    model: str
    reason: str
    has_external_cause: bool = False
    hint: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The model has moved to the residency tier that a `ChangeTier` action requested."""

    model: str


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """The device memory of a ready model was measured in bytes, without the pages that it shares with a runtime template."""

    model: str
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer has expired. The driver sends this event at the time that `Core.deadline` returned."""


@dataclass(frozen=True, slots=True)
class ConfigurationChanged:
    """The configuration changed. Running models that are not in `models` drain and stop, and the log shows `reason`.

    `settings` is None if the settings are unchanged.
    """

    models: tuple[ModelSpec, ...]
    settings: HostSettings | None = None
    reason: str = "no longer configured"


@dataclass(frozen=True, slots=True)
class ServerOutdated:
    """The model's server must be replaced, for example because its arguments changed: it finishes its requests and then stops.

    New requests wait for the next start, unless `is_replaceable` is set and the memory for a second server is free. `reason`
    is shown in the log. The core ignores this event while the model is starting, so it must be sent after the start has
    completed.
    """

    model: str
    reason: str = "the model's arguments changed"
    is_replaceable: bool = False


@dataclass(frozen=True, slots=True)
class ReplacementEnded:
    """One of the two servers of a `ReplaceServer` action has ended: the replaced one, or the new one because it failed."""

    model: str


ModelEvent = ModelReady | ModelFailed | TierChanged | MemoryMeasured | ServerOutdated | ReplacementEnded
Event = RequestArrived | RequestEnded | Tick | ConfigurationChanged | ModelEvent


@dataclass(frozen=True, slots=True)
class StartModel:
    """Start a model from its current residency tier, which is `tier`."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class ReplaceServer:
    """Start a second server of a ready model. Once it is ready, it gets all requests, and the first server stops when idle.

    A `ChangeTier` action for the model cancels this action.
    """

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeTier:
    """Move a model that has no running requests to a lower residency tier.

    `reason` is shown in the log. `evicted_for` is the model that needs the memory, if any.
    """

    model: str
    tier: Tier
    reason: str
    evicted_for: str | None = None


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """Forward a request to its target, which is a model of the host or a group of a fleet."""

    request: str
    target: str


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Reject a request with an HTTP status. `retry_after_s` is set if a retry may succeed.

    The client receives `reason` and `hint`. `log_detail` is only logged, because it may contain information that clients
    must not see.
    """

    request: str
    status: int
    reason: str
    retry_after_s: float | None = None
    log_detail: str = ""
    hint: str = ""


Action = StartModel | ReplaceServer | ChangeTier | DispatchRequest | RejectRequest
