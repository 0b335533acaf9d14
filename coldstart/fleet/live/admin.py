"""Admin routes of a fleet's gateway. They require a separate key, because a deployment can start any process.

GET   /fleet/status    the status document of the fleet
POST  /fleet/order     {"method": "deploy" / "remove" / "scale" / "drain", ...} with the fields of that order
POST  /fleet/down      stops all servers and the gateway
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from functools import reduce
from operator import or_
from typing import Any, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coldstart.errors import ColdstartError
from coldstart.fleet.live import state
from coldstart.fleet.live.control import FleetControl
from coldstart.host.live import messages

ADMIN_KEY_HEADER = "x-coldstart-admin-key"


def _define_order(method: Callable[..., None]) -> type[msgspec.Struct]:
    """Return the type of the orders that call a method: its name is the tag, and its parameters are the fields."""
    fields = [(name, kind) for name, kind in get_type_hints(method).items() if name != "return"]
    return msgspec.defstruct(
        method.__name__, fields, tag_field="method", tag=True, forbid_unknown_fields=True
    )


def create_routes(control: FleetControl, key: str, stop_fleet: Callable[[], Awaitable[None]]) -> list[Route]:
    """Return the admin routes. `stop_fleet` is called to stop the fleet and its gateway."""
    methods = {
        _define_order(one): one for one in (control.deploy, control.scale, control.remove, control.drain)
    }
    orders: Any = reduce(or_, methods)

    def require_admin_key(
        handle: Callable[[Request], Awaitable[Any]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get(ADMIN_KEY_HEADER, "").encode(), key.encode()):
                return messages.build_error_response(401, "the admin key is missing or invalid")
            try:
                return JSONResponse(await handle(request))
            except (ColdstartError, ValueError, RecursionError, OSError) as error:
                reason, hint = str(error) or "the body is nested too deeply", getattr(error, "hint", None)
                return messages.build_error_response(400, reason, hint=hint or "")

        return respond

    async def status(request: Request) -> Any:
        return control.status()

    async def order(request: Request) -> Any:
        parsed = state.decode(json.loads(await request.body()), orders)
        methods[type(parsed)](*msgspec.structs.astuple(parsed))
        return {}

    async def down(request: Request) -> Any:
        await stop_fleet()
        return {}

    return [
        Route("/fleet/status", require_admin_key(status)),
        Route("/fleet/order", require_admin_key(order), methods=["POST"]),
        Route("/fleet/down", require_admin_key(down), methods=["POST"]),
    ]
