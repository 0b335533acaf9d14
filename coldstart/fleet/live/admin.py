"""Admin routes of a fleet's gateway. They require a separate key, because a deployment can start any process.

GET   /fleet/status    the status document of the fleet
POST  /fleet/order     {"method": "deploy" / "remove" / "scale" / "drain", ...} with the fields of that order
POST  /fleet/down      stops all servers and the gateway
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coldstart.errors import ColdstartError
from coldstart.fleet.live import state
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.state import ModelDeployment
from coldstart.host.live import messages

ADMIN_KEY_HEADER = "x-coldstart-admin-key"


class _Order(msgspec.Struct, forbid_unknown_fields=True, tag_field="method", tag=str.lower):
    pass


class Deploy(_Order):
    """Order to deploy a model, or to change its deployment."""

    deployment: ModelDeployment


class Scale(_Order):
    """Order to set the minimum and maximum number of workers of a model."""

    model: str
    least: int
    most: int


class Remove(_Order):
    """Order to remove a model after its running requests have ended."""

    model: str


class Drain(_Order):
    """Order to start no new workers on a server."""

    server: str


Order = Deploy | Scale | Remove | Drain


def create_routes(control: FleetControl, key: str, stop_fleet: Callable[[], Awaitable[None]]) -> list[Route]:
    """Return the admin routes. `stop_fleet` is called to stop the fleet and its gateway."""
    methods: dict[type, Callable[..., None]] = {
        Deploy: control.deploy,
        Scale: control.scale,
        Remove: control.remove,
        Drain: control.drain,
    }

    def require_admin_key(
        handle: Callable[[Request], Awaitable[Any]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get(ADMIN_KEY_HEADER, "").encode(), key.encode()):
                return messages.build_error_response(401, "the admin key is missing or invalid")
            try:
                return JSONResponse(await handle(request))
            except (ColdstartError, ValueError, RecursionError, OSError) as error:
                reason, hint = str(error) or "the order is nested too deeply", getattr(error, "hint", None)
                return messages.build_error_response(400, reason, hint=hint or "")

        return respond

    async def status(request: Request) -> Any:
        return control.status()

    async def order(request: Request) -> Any:
        parsed = state.decode(json.loads(await request.body()), Order)
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
