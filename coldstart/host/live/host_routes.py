"""HTTP routes of a single host, whose servers run on this machine.

GET   /running                the models that hold memory, with their states;
GET   /logs/{name}            the end of the log of that model's server, while it runs; with ?follow also later lines;
POST  /load/{name}            start a model, and respond once it is ready; with ?wait=false at once;
POST  /unload, /unload/{name}    stop all models, or one, after their running requests; the next request starts them again;
GET   /metrics                Prometheus text of the host and of its running servers;
GET   /upstream/{name}/{path}    a running server's answer at one of `server_reads.READABLE`;
GET   READS                   the same of the only or the default model;
POST  /reload                 read the configuration again now;
POST  /stop                   stop the host as SIGTERM does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coldstart.errors import UsageError
from coldstart.host.live import messages, server_reads
from coldstart.host.live.access_control import CLIENT, READS, split_target
from coldstart.host.live.driver import Driver
from coldstart.host.live.front import AdmissionRefusedError, Ticket
from coldstart.host.live.messages import ClientGoneError, run_while_connected
from coldstart.host.live.server_log import LogReader
from coldstart.host.live.servers import ModelServer

TAIL_BYTES = 64 << 10
# Interval in seconds at which a followed log is read.
LOG_S = 0.2
# Time in seconds that a server may take to answer a read.
READ_S = 10.0


async def _load(driver: Driver, request: Request) -> Response:
    """Start the model in the path; respond once it is ready, or at once with `wait=false`.

    The order is admitted as a request is: it waits for memory, and is rejected for the same reasons. It is not counted.
    """
    waits = request.query_params.get("wait", "true")
    if waits not in ("true", "false"):
        return messages.refuse(400, f"wait is {waits!r}; it is true or false")
    try:
        keep_s = messages.find_keep_alive(request.scope)
    except ValueError as error:
        return messages.refuse(400, str(error))
    try:
        ticket = driver.load(request.path_params["name"], keep_s)
    except AdmissionRefusedError as refused:
        return messages.refuse(refused.status, refused.reason, refused.retry_after_s, hint=refused.hint)
    was_ready = ticket.granted.done()  # or it is refused at once
    if waits == "true":
        try:
            await run_while_connected(request.receive, lambda: asyncio.wait([ticket.granted]))
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            ticket.granted.cancel()  # does nothing once it is done
    return _describe(driver, ticket, was_ready=was_ready)


def _describe(driver: Driver, ticket: Ticket, *, was_ready: bool) -> Response:
    model = ticket.route.model
    if not ticket.granted.done():
        return JSONResponse({"model": model, "state": driver.state(model)}, status_code=202)
    error = ticket.granted.exception()
    if isinstance(error, AdmissionRefusedError):
        return messages.refuse(error.status, error.reason, error.retry_after_s, hint=error.hint)
    replica = ticket.granted.result()
    return JSONResponse(
        {
            "model": model,
            "state": "ready",
            "was_ready": was_ready,
            "mode": replica.mode,
            "waited_s": ticket.queued_s or 0.0,
            "evicted": ticket.evicted,
        }
    )


async def _show_log(driver: Driver, request: Request) -> Response:
    """Return the log of the model in the path; with the query member `follow`, also all later lines."""
    residence, missing = driver.find_server(request.path_params["name"])
    if residence is None:
        return messages.not_found(missing)
    if "follow" not in request.query_params:
        return PlainTextResponse(residence.server.log.tail(TAIL_BYTES))
    try:
        reader = residence.server.log.follow(TAIL_BYTES)
    except OSError as error:
        return messages.not_found(f"The log of {residence.name} cannot be read: {error.strerror}.")
    return StreamingResponse(_follow(residence.server, reader), media_type="text/plain")


async def _follow(server: ModelServer, reader: LogReader) -> AsyncIterator[str]:
    try:
        while True:
            has_ended = server.ended.done()
            if text := reader.read(last=has_ended):
                yield text
            elif has_ended:
                return
            else:
                await asyncio.wait([server.ended], timeout=LOG_S)
    finally:
        reader.close()


def host_routes(driver: Driver) -> list[Route]:
    """Return the routes for the servers of `driver`."""

    async def show_metrics(request: Request) -> Response:
        residences = driver.lifecycle.residences.values()
        text = await server_reads.add_metrics(driver.metrics.text(), residences)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_server(request: Request) -> Response:
        # The gateway passes a POST to a route for tokens on before.
        target = split_target(request.scope["path"], server_reads.READABLE)
        if target is None or request.method == "POST":
            return messages.not_found(f"unknown path {request.scope['path']}")
        return await _read_server(driver, *target)

    async def read_default(request: Request) -> Response:
        client = request.scope.get(CLIENT)
        if client is not None and not client.may_use(None, driver.catalogue):
            driver.metrics.count_client(client.name, "other_model")
            return messages.refuse(403, f"the client {client.name} may not use the host's default model")
        # A read starts no model: monitors read in intervals.
        return await _read_server(driver, None, request.scope["path"])

    async def unload(request: Request) -> Response:
        name = request.path_params.get("name")
        route = driver.catalogue.route(name) if name is not None else None
        model = route.model if route else name
        if model is not None and model not in driver.core.models:
            return messages.not_found(f"The model `{name}` does not exist.")
        return JSONResponse({"unloading": driver.unload(model)})

    return [
        Route("/metrics", show_metrics),
        *(Route(path, read_default) for path in READS),
        Route("/upstream/{name:path}/{path:path}", read_server, methods=["GET", "POST"]),
        Route("/running", partial(_show_running, driver)),
        Route("/logs/{name:path}", partial(_show_log, driver)),
        Route("/load/{name:path}", partial(_load, driver), methods=["POST"]),
        Route("/unload", unload, methods=["POST"]),
        Route("/unload/{name:path}", unload, methods=["POST"]),
    ]


def process_routes(reload: Callable[[], Awaitable[dict[str, Any]]], stop: Callable[[], int]) -> list[Route]:
    """Return the routes for the host's process.

    Args:
        reload: Reads the configuration again and returns the changes. Raises UsageError.
        stop: Begins to stop the host; returns the number of running requests.
    """

    async def reload_configuration(request: Request) -> Response:
        try:
            return JSONResponse(await reload())
        except UsageError as error:
            return messages.refuse(400, error.message, hint=error.hint or "")

    async def stop_host(request: Request) -> Response:
        return JSONResponse({"stopping": True, "in_flight": stop()}, status_code=202)

    return [
        Route("/reload", reload_configuration, methods=["POST"]),
        Route("/stop", stop_host, methods=["POST"]),
    ]


async def _read_server(driver: Driver, name: str | None, path: str) -> Response:
    residence, missing = driver.find_server(name)
    if residence is None:
        return messages.not_found(missing)
    try:
        status, kind, body = await server_reads.read(residence, path, READ_S)
    except OSError as error:
        reason = str(error) or f"no answer within {READ_S:g} s"
        return messages.refuse(502, f"the server of {residence.name} cannot be read: {reason}")
    return Response(body, status_code=status, media_type=kind)


async def _show_running(driver: Driver, request: Request) -> Response:
    residents = driver.core.residents
    running = [
        {"model": name, "state": str(model.state), "tier": model.tier.name}
        for name, model in residents.models.items()
        if residents.device.reserved(name)
    ]
    return JSONResponse({"running": running})
