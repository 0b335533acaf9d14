"""Events that the host's core receives and actions that it returns.

The live host and the simulator use no other interface to the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.host.specification import HostSettings, ModelSpec, Tier


@dataclass(frozen=True, slots=True)
class Arrived:
    """A new request; ids are unique.

    `counted` is false for an operator's order: neither the statistics nor the policy's history contain it.
    """

    request: str
    model: str
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """A pending or running request was answered, failed, or its client disconnected."""

    request: str


@dataclass(frozen=True, slots=True)
class Started:
    """The model is ready, `seconds` after the start order."""

    model: str
    seconds: float


NO_BUNDLE = "no-bundle"


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a failed order, as it travels between processes: the message, what helps, and the code of its kind, if any."""

    message: str
    hint: str = ""
    code: str = ""

    def __str__(self) -> str:
        code = f" [{self.code}]" if self.code and self.code != NO_BUNDLE else ""
        return f"{self.message}{code}" + (f" (hint: {self.hint})" if self.hint else "")


@dataclass(frozen=True, slots=True)
class Failed:
    """A start failed or a server process died; no process of the model remains.

    `external`: the cause is not the model, such as a killed process. `hint` and `code` are those of a Failure.
    """

    model: str
    reason: str
    external: bool = False
    hint: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A `Leave` order was carried out."""

    model: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured device memory of a model that serves, in bytes, without the pages of a runtime template."""

    model: str
    memory: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The driver sends this event when `Core.deadline` is reached."""


@dataclass(frozen=True, slots=True)
class Configured:
    """New configuration: the models, and the limits if given. Models that are no longer listed drain and stop.

    `reason` is that of their `Leave`.
    """

    models: tuple[ModelSpec, ...]
    settings: HostSettings | None = None
    reason: str = "no longer configured"


@dataclass(frozen=True, slots=True)
class Outdated:
    """The running server of the model has outdated arguments: it finishes its requests and stops.

    Requests that arrive meanwhile wait for the next start. The core ignores this event for a model that is starting;
    send it after the start. `reason` is that of the `Leave` that follows.
    """

    model: str
    reason: str = "its arguments changed"


Event = Arrived | Ended | Started | Failed | Left | Measured | Tick | Configured | Outdated


@dataclass(frozen=True, slots=True)
class Start:
    """Bring the model from this tier to serving."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Leave:
    """Move the model into this tier; no request uses it. `reason` is for people; `evicted_for` is the model that needs
    the memory, if any.
    """

    model: str
    tier: Tier
    reason: str
    evicted_for: str | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to its target now: a model of the host, or a group of a fleet. A stream that has begun continues."""

    request: str
    target: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the request with this HTTP status; `retry_after_s` if a retry may succeed.

    `reason` and `hint` are for the client. `detail` is for the host's log: it may contain facts that a client must not see.
    """

    request: str
    status: int
    reason: str
    retry_after_s: float | None = None
    detail: str = ""
    hint: str = ""


Action = Start | Leave | Dispatch | Refuse
