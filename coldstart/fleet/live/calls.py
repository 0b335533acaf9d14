"""Answer calls to the controller: one JSON document in, one out."""

from __future__ import annotations

from typing import Any

from coldstart.errors import ColdstartError
from coldstart.fleet.live import messages, wire
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.messages import AdminOrder, Attach, Call, GetStatus, Pull, Report


async def answer(control: FleetControl, document: Any) -> Any:
    """Return the reply document.

    Raises:
        msgspec.ValidationError: the document is no call.
    """
    call: Call = messages.read(document, Call)
    match call:
        case Attach():
            return messages.document(control.calls.attach(call))
        case Pull():
            return messages.document(await control.calls.pull(call))
        case Report():
            return messages.document(control.calls.report(call))
        case GetStatus():
            return control.status()
        case AdminOrder():
            return _order(control, call)


def _order(control: FleetControl, call: AdminOrder) -> dict[str, Any]:
    """Return {}, or {"error", "hint"} if the controller refuses."""
    try:
        getattr(control, call.method)(*map(wire.thing, call.args))
    except (ColdstartError, ValueError, TypeError, OSError) as error:
        return {"error": str(error), "hint": getattr(error, "hint", None)}
    return {}
