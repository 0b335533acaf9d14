"""HTTP routes of a single host, whose servers run on this machine.

GET   /logs/{name}            the end of the log of that model's server, while it runs; with ?follow also later lines;
POST  /load/{name}            start a model, and respond once it is ready; with ?wait=false at once;
POST  /unload, /unload/{name}    stop all models, or one, after their running requests; the next request starts them again;
GET   /metrics                Prometheus text of the host and of its running servers;
GET   /upstream/{name}/{path}    a running server's answer at one of READABLE;
GET   READS                   the same of the only or the default model;
POST  /reload                 read the configuration again now;
POST  /stop                   stop the host as SIGTERM does.

The metrics of several servers are merged into one text, each with a label that names its model. prometheus_client's parser
takes half a second of CPU time for each server, which streams of tokens need; so whole lines are checked and relabelled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coldstart.errors import UsageError
from coldstart.host.live import messages
from coldstart.host.live.access_control import CLIENT, READS
from coldstart.host.live.driver import Driver
from coldstart.host.live.front import AdmissionRefusedError, Ticket
from coldstart.host.live.lifecycle import Residence
from coldstart.host.live.messages import ClientGoneError, run_while_connected
from coldstart.host.live.server_log import LogReader
from coldstart.host.live.servers import ModelServer
from coldstart.host.live.upstream import DisconnectedError

TAIL_BYTES = 64 << 10
# Interval in seconds at which a followed log is read.
LOG_S = 0.2
# Time in seconds that a server may take to answer a read, and for its metrics.
READ_S, METRICS_S = 10.0, 1.0
MAX_BYTES = 8 << 20
READABLE = ("/health", "/load", "/metrics", "/ping", "/tokenizer_info", "/version")
"""Routes of vLLM's server that a GET may read: they change nothing and reveal no arguments and no paths."""
_LABELS = r'(?:\w+="(?:[^"\\]|\\.)*"(?:,|(?=\})))*'
_VALUE = r"[-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|Inf|NaN)(?: -?[0-9]+)?"
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{({_LABELS})\}})?( {_VALUE})", re.ASCII)
_READ = "coldstart_host_server_metrics_read"


async def read(residence: Residence, path: str, timeout_s: float) -> tuple[int, str, bytes]:
    """Return status, content type and body of a GET.

    Raises:
        OSError: The server does not answer in time, disconnects, or answers with more than MAX_BYTES.
    """
    own = messages.present_key(residence.key)
    async with (
        asyncio.timeout(timeout_s),
        await residence.upstream.request("GET", path, headers=own) as answer,
    ):
        body = b""
        while part := await answer.piece():
            body += part
            if len(body) > MAX_BYTES:
                raise DisconnectedError(f"the server answers with more than {MAX_BYTES} bytes")
        given = {name.lower(): value for name, value in answer.headers}
        kind = given.get(b"content-type", b"application/octet-stream").decode("latin-1")
        return answer.status, kind, body


def merge(own: str, servers: Iterable[tuple[str, str]]) -> tuple[str, list[str]]:
    """Add the metrics of `servers`, pairs of a model and a text, to `own`; return them, and the models with invalid texts.

    A family has one HELP and TYPE, and its samples stand together.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    omitted = []
    for model, text in servers:
        try:
            found = _label(text, model)
        except (ValueError, IndexError):
            omitted.append(model)
            continue
        for name, (about, samples) in found.items():
            families.setdefault(name, (about, []))[1].extend(samples)
    return own + "".join(
        line + "\n" for group in families.values() for part in group for line in part
    ), omitted


def _label(text: str, model: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return comments and labelled samples of each family. Raises ValueError or IndexError for an invalid text."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    label, family = f'model="{escape(model)}"', ""
    for line in filter(None, text.split("\n")):
        if line.startswith("#"):
            family = line.split(" ", 3)[2]
            families.setdefault(family, ([], []))[0].append(line)
            continue
        if (sample := _SAMPLE.fullmatch(line)) is None:
            raise ValueError(f"invalid line {line[:80]!r}")
        name, labels, value = sample.groups()
        # Prometheus itself renames a label of the target that collides with its own.
        labels = re.sub(r"(?:^|(?<=,))model=", "exported_model=", (labels or "").rstrip(","))
        key = family if name.startswith(family) else name
        families.setdefault(key, ([], []))[1].append(
            f"{name}{{{','.join(filter(None, (label, labels)))}}}{value}"
        )
    return families


def escape(value: str) -> str:
    """Return `value` as the content of a quoted label value."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


async def add_metrics(own: bytes, residences: Iterable[Residence]) -> str:
    """Return the host's own metrics with those of its running servers, each labelled with its model."""
    serving = [residence for residence in residences if residence.serves]
    texts = await asyncio.gather(*map(_read_metrics, serving))
    given = [(one.name, text) for one, text in zip(serving, texts, strict=True) if text is not None]
    # A thread, because many servers have many lines.
    merged, omitted = await asyncio.to_thread(merge, own.decode(), given)
    were_read = {model for model, _ in given}.difference(omitted)
    lines = [f'{_READ}{{model="{escape(one.name)}"}} {int(one.name in were_read)}\n' for one in serving]
    about = f"# HELP {_READ} 1 if the server's own metrics are included, else 0.\n# TYPE {_READ} gauge\n"
    return merged + about + "".join(lines)


async def _read_metrics(residence: Residence) -> str | None:
    try:
        status, _, body = await read(residence, "/metrics", METRICS_S)
        return body.decode() if status == 200 else None
    except (OSError, UnicodeDecodeError):
        return None


async def _load(driver: Driver, request: Request) -> Response:
    """Start the model in the path; respond once it is ready, or at once with `wait=false`.

    The order is admitted as a request is: it waits for memory, and is rejected for the same reasons. It is not counted.
    """
    waits = request.query_params.get("wait", "true")
    if waits not in ("true", "false"):
        return messages.refuse(400, f"wait is {waits!r}; it is true or false")
    try:
        ticket = driver.load(request.path_params["name"])
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
        text = await add_metrics(driver.metrics.text(), residences)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_server(request: Request) -> Response:
        path = "/" + request.path_params["path"]
        if path not in READABLE:
            return messages.not_found(f"unknown path {request.scope['path']}")
        return await _read_server(driver, request.path_params["name"], path)

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
        Route("/upstream/{name:path}/{path:path}", read_server),
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
        status, kind, body = await read(residence, path, READ_S)
    except OSError as error:
        reason = str(error) or f"no answer within {READ_S:g} s"
        return messages.refuse(502, f"the server of {residence.name} cannot be read: {reason}")
    return Response(body, status_code=status, media_type=kind)
