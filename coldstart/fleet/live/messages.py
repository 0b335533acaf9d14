"""Messages between a gateway and the controller, which are two processes.

A gateway attaches with its open requests, then pulls orders and routes and reports events, each in order. A message
leaves its process as a JSON document; `document` and `read` convert, and `read` checks every field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from coldstart.contract.arguments import Arguments
from coldstart.host.launches import Launch


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    """A request waits at the gateway for a group."""

    request: str
    model: str


class RequestRouted(msgspec.Struct, frozen=True, tag=True):
    """The gateway has sent a request to a group by a known route."""

    request: str
    model: str
    group: str


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """A request has ended, for any reason."""

    request: str


class MoveEnded(msgspec.Struct, frozen=True, tag=True):
    """The move of a request's stream has ended; `moved` is false if the stream continues where it was."""

    request: str
    moved: bool


class GroupReleased(msgspec.Struct, frozen=True, tag=True):
    """The gateway has no more requests at a group whose route was withdrawn, and will send none."""

    group: str


GatewayEvent = RequestArrived | RequestRouted | RequestEnded | MoveEnded | GroupReleased


class SendRequest(msgspec.Struct, frozen=True, tag=True):
    """Send a waiting request to a group."""

    request: str
    group: str


class RefuseRequest(msgspec.Struct, frozen=True, tag=True):
    """Reject a waiting request with an HTTP status; the client may retry after `retry_s` seconds."""

    request: str
    status: int
    reason: str
    retry_s: float | None


class MoveRequest(msgspec.Struct, frozen=True, tag=True):
    """Move the stream of a request to a group."""

    request: str
    group: str


RequestOrder = SendRequest | RefuseRequest | MoveRequest


class NumberedOrder(msgspec.Struct, frozen=True):
    """An order to one gateway; numbers ascend."""

    number: int
    order: RequestOrder


class GroupRoute(msgspec.Struct, frozen=True):
    """A group that serves: its model, URL and its server's key, number of requests at once, and how it started."""

    group: str
    model: str
    url: str
    capacity: int
    mode: str
    start_s: float
    key: str = ""


class OpenRequest(msgspec.Struct, frozen=True):
    """An open request of a gateway; `group` is None while it waits."""

    request: str
    model: str
    group: str | None


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Attach a gateway with the groups that it can send to and its open requests."""

    gateway: str
    groups: tuple[str, ...]
    requests: tuple[OpenRequest, ...]


class Pull(msgspec.Struct, frozen=True, tag=True):
    """A gateway asks for the orders after number `after` and for changed routes; the reply may take some seconds."""

    gateway: str
    incarnation: str
    after: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Report events of a gateway, in order."""

    gateway: str
    incarnation: str
    events: tuple[GatewayEvent, ...]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for the controller's part of the status document."""


class AdminOrder(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the controller for an operator; arguments as `wire` writes them."""

    method: Literal["deploy", "remove", "scale", "drain"]
    args: tuple[Any, ...]


Call = Attach | Pull | Report | GetStatus | AdminOrder


class AttachReply(msgspec.Struct, frozen=True, tag=True):
    """The gateway is attached to this incarnation of the controller."""

    incarnation: str


class News(msgspec.Struct, frozen=True, tag=True):
    """Orders in ascending order; the rest only if it has changed. `hung` counts the hung servers by model."""

    orders: tuple[NumberedOrder, ...] = ()
    routes: tuple[GroupRoute, ...] | None = None
    launches: tuple[Launch, ...] = ()
    hung: dict[str, int] = {}


class Received(msgspec.Struct, frozen=True, tag=True):
    """The events were processed."""


class NotAttached(msgspec.Struct, frozen=True, tag=True):
    """The gateway is unknown to this incarnation of the controller and has to attach."""


def document(message: msgspec.Struct) -> Any:
    """Return the message as a JSON document."""
    return msgspec.to_builtins(message)


def read(given: Any, kind: Any) -> Any:
    """Return the message in a JSON document; `kind` is a class or a union of classes.

    Raises:
        msgspec.ValidationError: The document is not a valid message of this kind; a ValueError.
        UsageError: A launch in it is invalid.
    """
    return msgspec.convert(given, kind, dec_hook=_decode)


def _decode(kind: type, given: Any) -> Any:
    if kind is Arguments:
        return Arguments(given)
    raise NotImplementedError(f"a message cannot contain a {kind.__name__}")
