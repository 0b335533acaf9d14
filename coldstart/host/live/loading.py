"""Start of a model on an operator's order, without a request for tokens.

The order is admitted as a request is: it waits for memory, and is rejected for the same reasons. It is not counted.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coldstart.host.live import answers, headers
from coldstart.host.live.client import ClientGoneError, run_while_connected
from coldstart.host.live.driver import Driver
from coldstart.host.live.tickets import AdmissionRefusedError, Ticket


async def respond(driver: Driver, request: Request) -> Response:
    """Start the model in the path; respond once it is ready, or at once with `wait=false`."""
    waits = request.query_params.get("wait", "true")
    if waits not in ("true", "false"):
        return answers.refuse(400, f"wait is {waits!r}; it is true or false")
    try:
        keep_s = headers.find_keep_alive(request.scope)
    except ValueError as error:
        return answers.refuse(400, str(error))
    try:
        ticket = driver.enter(request.path_params["name"], counted=False)
    except AdmissionRefusedError as refused:
        return answers.refuse(refused.status, refused.reason, refused.retry_after_s)
    was_ready = ticket.granted.done()  # or it is refused at once
    ticket.keep_s = keep_s
    ticket.granted.add_done_callback(lambda _: _end(driver, ticket))
    if waits == "true":
        try:
            await run_while_connected(request.receive, lambda: asyncio.wait([ticket.granted]))
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            ticket.granted.cancel()  # does nothing once it is done
    return _describe(driver, ticket, was_ready=was_ready)


def _end(driver: Driver, ticket: Ticket) -> None:
    ticket.passed_on()
    driver.leave(ticket)


def _describe(driver: Driver, ticket: Ticket, *, was_ready: bool) -> Response:
    model = ticket.route.model
    if not ticket.granted.done():
        return JSONResponse({"model": model, "state": driver.state(model)}, status_code=202)
    error = ticket.granted.exception()
    if isinstance(error, AdmissionRefusedError):
        return answers.refuse(error.status, error.reason, error.retry_after_s)
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
