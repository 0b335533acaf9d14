"""HTTP routes of a single host, whose servers run on this machine.

GET   /running                the models that hold memory, with their states;
GET   /logs/{name}            the end of the log of that model's server, while it runs;
POST  /unload, /unload/{name}    stop all models, or one, after their running requests; the next request starts them again.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from coldstart.host.live import answers
from coldstart.host.live.driver import Driver

LOG_TAIL_BYTES = 64 << 10


def host_routes(driver: Driver) -> list[Route]:
    """Return the routes for the servers of `driver`."""

    async def show_running(request: Request) -> Response:
        return JSONResponse({"running": _running(driver)})

    async def show_log(request: Request) -> Response:
        residence = driver.lifecycle.residences.get(request.path_params["name"])
        if residence is None:
            return answers.not_found("No server of this model is running.")
        return PlainTextResponse(residence.server.tail(LOG_TAIL_BYTES))

    async def unload(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None and name not in driver.core.models:
            return answers.not_found(f"The model `{name}` does not exist.")
        return JSONResponse({"unloading": driver.unload(name)})

    return [
        Route("/running", show_running),
        Route("/logs/{name:path}", show_log),
        Route("/unload", unload, methods=["POST"]),
        Route("/unload/{name:path}", unload, methods=["POST"]),
    ]


def _running(driver: Driver) -> list[dict[str, str]]:
    residents = driver.core.residents
    return [
        {"model": name, "state": str(model.state), "tier": model.tier.name}
        for name, model in residents.models.items()
        if residents.device.reserved(name)
    ]
