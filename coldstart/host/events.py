"""Events that the core of a host receives, and actions that it returns.

They are the only interface between the core and its two users, the live host and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.host.specification import HostSettings, ModelSpec, Tier


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request arrived; request ids are unique.

    `counted` is false for a load order of an operator, which statistics and the eviction policy ignore.
    """

    request: str
    model: str
    counted: bool = True


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A pending or running request was answered or failed, or its client disconnected."""

    request: str


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The server of the model is ready, `seconds` after its start was ordered."""

    model: str
    seconds: float


NO_BUNDLE = "no-bundle"


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a failure that processes send to each other: message, hint, and error code, if any."""

    message: str
    hint: str = ""
    code: str = ""

    def __str__(self) -> str:
        code = f" [{self.code}]" if self.code and self.code != NO_BUNDLE else ""
        return f"{self.message}{code}" + (f" (hint: {self.hint})" if self.hint else "")


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """A start failed or a server process exited; no process of the model remains.

    `external` is True if the model did not cause the failure, for example if the process was killed. `hint` and `code`
    are those of the `Failure`.
    """

    model: str
    reason: str
    external: bool = False
    hint: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The model has reached the tier that a `ChangeTier` action ordered."""

    model: str


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """The device memory of a ready model was measured, in bytes, without the pages shared with a runtime template."""

    model: str
    memory: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The driver sends this event when `Core.deadline` is reached."""


@dataclass(frozen=True, slots=True)
class ConfigurationChanged:
    """The configuration changed. Models that are no longer listed drain and stop, for the reason `reason`.

    `settings` is None if the settings are unchanged.
    """

    models: tuple[ModelSpec, ...]
    settings: HostSettings | None = None
    reason: str = "no longer configured"


@dataclass(frozen=True, slots=True)
class ServerOutdated:
    """The running server of the model has outdated arguments: it finishes its requests and stops, for the reason `reason`.

    New requests wait for the next start. The core ignores this event while the model is starting, so send it after the
    start.
    """

    model: str
    reason: str = "its arguments changed"


Event = (
    RequestArrived
    | RequestEnded
    | ModelReady
    | ModelFailed
    | TierChanged
    | MemoryMeasured
    | Tick
    | ConfigurationChanged
    | ServerOutdated
)


@dataclass(frozen=True, slots=True)
class StartModel:
    """Start the model from its current tier, `tier`."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class ChangeTier:
    """Move a model without running requests to a lower tier.

    `reason` is a text for logs. `evicted_for` is the model that needs the memory, if any.
    """

    model: str
    tier: Tier
    reason: str
    evicted_for: str | None = None


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """Forward the request to its target: a model of the host, or a group of a fleet."""

    request: str
    target: str


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Reject the request with an HTTP status; `retry_after_s` is set if a retry may succeed.

    The client receives `reason` and `hint`. `detail` goes only to the log, because it can contain information that clients must
    not see.
    """

    request: str
    status: int
    reason: str
    retry_after_s: float | None = None
    detail: str = ""
    hint: str = ""


Action = StartModel | ChangeTier | DispatchRequest | RejectRequest
