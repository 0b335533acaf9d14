"""Log of a running server as a response: its end, or a stream of its lines until the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from coldstart.host.live import answers
from coldstart.host.live.driver import Driver
from coldstart.host.live.server_log import LogReader
from coldstart.host.live.servers import ModelServer

TAIL_BYTES = 64 << 10
# Interval in seconds at which a followed log is read.
READ_S = 0.2


def respond(driver: Driver, request: Request) -> Response:
    """Return the log of the model in the path; with the query member `follow`, also all later lines."""
    residence, missing = driver.find_server(request.path_params["name"])
    if residence is None:
        return answers.not_found(missing)
    if "follow" not in request.query_params:
        return PlainTextResponse(residence.server.log.tail(TAIL_BYTES))
    try:
        reader = residence.server.log.follow(TAIL_BYTES)
    except OSError as error:
        return answers.not_found(f"The log of {residence.name} cannot be read: {error.strerror}.")
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
                await asyncio.wait([server.ended], timeout=READ_S)
    finally:
        reader.close()
