"""What the host is told, and what it orders. The live host and the simulator speak nothing else to the core."""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.host.specification import AWAKE, HostSettings, ModelSpec, Tier


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request; ids are unique."""

    request: str
    model: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A request was answered, failed, or its client went; held or in flight."""

    request: str


@dataclass(frozen=True, slots=True)
class Started:
    """The model serves, `seconds` after the order; `memory` as measured, in bytes."""

    model: str
    seconds: float
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A start failed or a process died; nothing of the model is left."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The order to leave was carried out."""

    model: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A model holds so many device bytes in that tier; as for `awake`, only while it serves."""

    model: str
    memory: int
    tier: str = AWAKE


@dataclass(frozen=True, slots=True)
class TemplateHeld:
    """The host itself keeps a warm process of so many device bytes, of which starts are forked; 0: none."""

    memory: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: due at `Core.deadline`."""


@dataclass(frozen=True, slots=True)
class Configured:
    """The models from now on, and the limits where these are given. Models no longer named drain and go."""

    models: tuple[ModelSpec, ...]
    settings: HostSettings | None = None


@dataclass(frozen=True, slots=True)
class Outdated:
    """What serves of the model was started by words that hold no longer: it finishes what it has, and stops.

    Requests that come meanwhile wait for the next start. Says nothing to a model that starts: tell it then.
    """

    model: str


Event = Arrived | Ended | Started | Failed | Left | Measured | TemplateHeld | Tick | Configured | Outdated


@dataclass(frozen=True, slots=True)
class Start:
    """Bring the model from that tier to serving."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Leave:
    """Put the model into that tier; nobody uses it."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Abort:
    """The start passed its deadline: end it; `Failed` follows."""

    model: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to its model now."""

    request: str
    model: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the request with this HTTP status; `retry_after_s` where trying again may help.

    `reason` is for the client, `detail` for the host's log: it may name what a client has no business to know.
    """

    request: str
    status: int
    reason: str
    retry_after_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The warm process that is held is in the way of a model: end it once nothing depends on it; `TemplateHeld(0)` follows."""


Action = Start | Leave | Abort | Dispatch | Refuse | GiveUp
