"""Operator routes of a fleet's gateway. They require a separate key, because a deployment can start any process.

GET   /fleet/status
POST  /fleet/order     {"method": deploy / remove / scale / drain, "args": [...]}, as `wire` encodes them
POST  /fleet/down      ends every server and the controller
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coldstart.errors import UsageError
from coldstart.fleet.live import messages
from coldstart.fleet.live.contact import ControllerAwayError
from coldstart.fleet.live.front import FleetFront
from coldstart.fleet.live.messages import AdminOrder

HEADER = "x-coldstart-admin-key"


def routes(front: FleetFront, key: str, down: Callable[[], Awaitable[None]]) -> list[Route]:
    """Return the routes; `down` ends the fleet and the gateway."""

    def guarded(work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get(HEADER, "").encode(), key.encode()):
                return JSONResponse({"error": "the admin key is missing or wrong"}, status_code=401)
            try:
                found = await work(request)
            except ControllerAwayError as error:
                return JSONResponse({"error": f"the controller cannot be reached: {error}"}, status_code=503)
            except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
                return JSONResponse({"error": f"invalid order: {error}"}, status_code=400)
            return JSONResponse(found, status_code=400 if "error" in found else 200)

        return answer

    async def status(request: Request) -> Any:
        return await front.refreshed()

    async def order(request: Request) -> Any:
        asked = messages.read(json.loads(await request.body()), AdminOrder)
        return await front.contact.connection.call(asked)

    async def end(request: Request) -> Any:
        await down()
        return {}

    return [
        Route("/fleet/status", guarded(status)),
        Route("/fleet/order", guarded(order), methods=["POST"]),
        Route("/fleet/down", guarded(end), methods=["POST"]),
    ]
