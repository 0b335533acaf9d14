"""HTTP routes of a single host, whose servers run on this machine.

GET   /logs/{name}            the end of the log of the model's running server; ?follow also streams new lines
POST  /load/{name}            start a model, and respond when it is ready, or immediately with ?wait=false
POST  /unload, /unload/{name}    stop all models, or one model, after their running requests; the next request restarts them
GET   /metrics                Prometheus metrics of the host and its running servers
GET   /upstream/{name}/{path}    the response of a model's running server at {path}, which must be in READABLE
GET   READ_PATHS              the same for the default model, or for the only model
POST  /reload                 reload the configuration
POST  /stop                   stop the host, as SIGTERM does

`host.live.run` adds the routes /reload and /stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coldstart.host.live import messages
from coldstart.host.live.access_control import CLIENT, READ_PATHS
from coldstart.host.live.driver import Driver
from coldstart.host.live.lifecycle import LocalReplica
from coldstart.host.live.messages import ClientGoneError, run_while_connected
from coldstart.host.live.request_router import AdmissionRefusedError
from coldstart.host.live.upstream import DisconnectedError

TAIL_BYTES = 64 << 10
# Time limits in seconds for a server's response to a read, and for reading its metrics.
READ_S, METRICS_S = 10.0, 1.0
MAX_BYTES = 8 << 20
READABLE = ("/health", "/load", "/metrics", "/ping", "/tokenizer_info", "/version")
"""Paths of vLLM's server that clients may read. They change nothing and reveal neither arguments nor file paths."""
_READ = "coldstart_host_server_metrics_read"
_ABOUT = ("# HELP ", "# TYPE ")


async def read_from_server(replica: LocalReplica, path: str, timeout_s: float) -> tuple[int, str, bytes]:
    """Send a GET request to a model server, and return the status, content type and body of the response.

    Raises:
        OSError: The server does not respond within `timeout_s` seconds, disconnects, or sends more than MAX_BYTES.
    """
    own = messages.build_auth_header(replica.key)
    async with (
        asyncio.timeout(timeout_s),
        await replica.upstream.request("GET", path, headers=own) as answer,
    ):
        body = b""
        while part := await answer.read_chunk():
            body += part
            if len(body) > MAX_BYTES:
                raise DisconnectedError(f"the server's response to {path} exceeds {MAX_BYTES} bytes")
        given = {name.lower(): value for name, value in answer.headers}
        kind = given.get(b"content-type", b"application/octet-stream").decode("latin-1")
        return answer.status, kind, body


def merge_metrics(own: str, servers: Iterable[tuple[str, str]]) -> str:
    """Append the metrics of vLLM servers to the host's metrics `own`, and add the label `model` to each of their samples.

    `servers` are pairs of a model name and the metrics of its server in the Prometheus text format. Each metric family
    has one HELP and one TYPE line, followed by all its samples. The lines are labeled as text, because
    prometheus_client's parser would use half a second of CPU time per server, which delays token streams.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for model, text in servers:
        label, about, samples = f'model="{escape_label(model)}"', list[str](), list[str]()
        for line in text.split("\n"):
            if line.startswith(_ABOUT):
                about, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in about:
                    about.append(line)
            elif not line or line.startswith("#"):
                continue
            elif "{" in line:
                samples.append(line.replace("{", f"{{{label},", 1))
            else:
                samples.append(line.replace(" ", f"{{{label}}} ", 1))
    lines = (line for family in families.values() for part in family for line in part)
    return own + "".join(f"{line}\n" for line in lines)


def escape_label(value: str) -> str:
    """Escape `value` for use as a quoted label value."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


async def add_server_metrics(own: bytes, replicas: Iterable[LocalReplica]) -> str:
    """Return the host's own metrics and those of its running servers, each labeled with its model."""
    serving = [replica for replica in replicas if replica.is_serving]
    found = await asyncio.gather(*map(_read_metrics, serving))
    texts = dict(zip([one.name for one in serving], found, strict=True))
    given = [(model, text) for model, text in texts.items() if text is not None]
    # Use a thread, because the metrics of many servers have many lines.
    merged = await asyncio.to_thread(merge_metrics, own.decode(), given)
    about = f"# HELP {_READ} 1 if the server's own metrics are included, else 0.\n# TYPE {_READ} gauge\n"
    were_read = (
        f'{_READ}{{model="{escape_label(model)}"}} {int(text is not None)}\n' for model, text in texts.items()
    )
    return merged + about + "".join(were_read)


async def _read_metrics(replica: LocalReplica) -> str | None:
    try:
        status, _, body = await read_from_server(replica, "/metrics", METRICS_S)
        text = body.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return text if status == 200 else None


async def _load(driver: Driver, request: Request) -> Response:
    """Start the model in the path. Respond when it is ready, or immediately if `wait` is "false".

    The order is admitted like a request: it waits for memory, and is rejected for the same reasons. It is not counted.
    """
    waits = request.query_params.get("wait", "true")
    if waits not in ("true", "false"):
        return messages.build_error_response(
            400, f"invalid query parameter wait={waits!r}: use true or false"
        )
    try:
        ticket = driver.start_model(request.path_params["name"])
        model, was_ready = ticket.destination.model, ticket.granted.done()  # or it is refused at once
        if not was_ready and waits == "false":
            return JSONResponse({"model": model, "state": driver.get_state(model)}, status_code=202)
        try:
            await run_while_connected(request.receive, lambda: asyncio.wait([ticket.granted]))
        finally:
            ticket.granted.cancel()  # does nothing once it is done
        replica = ticket.granted.result()
    except AdmissionRefusedError as refused:
        return messages.build_error_response(
            refused.status, refused.reason, refused.retry_after_s, hint=refused.hint
        )
    except ClientGoneError:
        return Response(status_code=499)
    loaded = {"was_ready": was_ready, "mode": replica.mode, "waited_s": ticket.queued_s or 0.0}
    return JSONResponse({"model": model, "state": "ready", **loaded, "evicted": ticket.evicted_models})


async def _show_log(driver: Driver, request: Request) -> Response:
    replica, missing = driver.find_server(request.path_params["name"])
    if replica is None:
        return messages.build_error_response(404, missing)
    log = replica.server.log
    if "follow" not in request.query_params:
        return PlainTextResponse(log.tail(TAIL_BYTES))
    return StreamingResponse(log.follow(TAIL_BYTES, replica.server.ended), media_type="text/plain")


async def _read_server(driver: Driver, request: Request) -> Response:
    """Return the running server's response at a readable path.

    Reading never starts a model, because monitors poll these paths.
    """
    name, target = request.path_params.get("name"), request.scope["path"]
    path = target if name is None else "/" + request.path_params["path"]
    client = request.scope.get(CLIENT)
    if path not in READABLE:
        return messages.build_error_response(404, f"unknown path {target}")
    if name is None and client is not None and not client.may_use(None, driver.catalogue):
        driver.metrics.count_client_request(client.name, "other_model")
        return messages.build_error_response(
            403, f"client {client.name} is not allowed to use the host's default model"
        )
    replica, missing = driver.find_server(name)
    if replica is None:
        return messages.build_error_response(404, missing)
    try:
        status, kind, body = await read_from_server(replica, path, READ_S)
    except OSError as error:
        reason = str(error) or f"no response within {READ_S:g} s"
        return messages.build_error_response(
            502, f"cannot read {path} from the server of {replica.name}: {reason}"
        )
    return Response(body, status_code=status, media_type=kind)


def create_host_routes(driver: Driver) -> list[Route]:
    """Create the routes for the host's model servers."""

    async def show_metrics(request: Request) -> Response:
        replicas = driver.lifecycle.replicas.values()
        text = await add_server_metrics(driver.metrics.format_text(), replicas)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def unload(request: Request) -> Response:
        name = request.path_params.get("name")
        route = driver.catalogue.find_destination(name) if name is not None else None
        model = route.model if route else name
        if model is not None and model not in driver.core.models:
            return messages.build_error_response(404, f"The model `{name}` does not exist.")
        return JSONResponse({"unloading": driver.stop_models(model)})

    return [
        Route("/metrics", show_metrics),
        *(Route(path, partial(_read_server, driver)) for path in READ_PATHS),
        Route("/upstream/{name:path}/{path:path}", partial(_read_server, driver)),
        Route("/logs/{name:path}", partial(_show_log, driver)),
        Route("/load/{name:path}", partial(_load, driver), methods=["POST"]),
        Route("/unload", unload, methods=["POST"]),
        Route("/unload/{name:path}", unload, methods=["POST"]),
    ]
