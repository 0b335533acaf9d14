"""Commands that call a running host over HTTP."""

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import Verbatim, one_line, printable, table

from coldstart.contract import environment
from coldstart.errors import CommandFailedError, UsageError
from coldstart.units import format_memory

if TYPE_CHECKING:
    from coldstart.commands._client import ServerClient

# A start may take as long as the host allows; the host ends the wait.
_PATIENT_S = 7 * 86400.0
_LOOK_S = 0.1


def _declare_url(command: str) -> Any:
    own = f"{environment.PREFIX}_HOST_{command}_URL"
    return typer.Option("--url", metavar="URL", envvar=[own, environment.HOST_URL], help="URL of the host.")


Key = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="API key of the host, if it requires one."),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name or alias of a model of the host.",
        autocompletion=complete_model,
    ),
]
URL = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for function, text in COMMANDS.items():
        app.command(help=text)(declare()(function))


def status(
    common: Common,
    url: Annotated[str, _declare_url("STATUS")] = URL,
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", help="Refresh at this interval until Ctrl-C."),
    ] = None,
    api_key: Key = None,
) -> None:
    """Print the status once, or refresh it."""
    host = _connect(common, url, api_key)
    if watch is None:
        found = _read_status(host, url)
        common.out.result(found, lambda: render(found))
        return
    if watch <= 0:
        raise UsageError("--watch must be above 0 seconds", hint="--watch 1")
    if common.out.format == "json":
        raise UsageError("--watch and --format json exclude each other", hint="remove one of them")
    watching(lambda: _read_status(host, url), watch)


def load(
    common: Common,
    name: Name,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the model is ready, or return at once.")
    ] = True,
    url: Annotated[str, _declare_url("LOAD")] = URL,
    api_key: Key = None,
) -> None:
    """Start a model as a request would."""
    host = _connect(common, url, api_key, wait_s=_PATIENT_S)
    with common.out.phase(f"Loading {name}"):
        found = _order(host, url, f"/load/{quote(name)}" + ("" if wait else "?wait=false"))
    seconds = f" after {found['waited_s']:.1f} s" if "waited_s" in found else ""
    evicted = f"; evicted {', '.join(found['evicted'])}" if found.get("evicted") else ""
    state = "was already ready" if found.get("was_ready") else f"is {found['state']}{seconds}{evicted}"
    common.out.result(found, f"{found['model']} {state}")


def unload(
    common: Common,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name or alias; default: all models that are not pinned.",
            autocompletion=complete_model,
        ),
    ] = None,
    url: Annotated[str, _declare_url("UNLOAD")] = URL,
    api_key: Key = None,
) -> None:
    """Stop one model, or all that are not pinned."""
    path = "/unload" if name is None else f"/unload/{quote(name)}"
    found = _order(_connect(common, url, api_key), url, path)
    names = ", ".join(found["unloading"])
    common.out.result(
        found, f"unloading {names}" if names else f"{name} is not running" if name else "no model to unload"
    )


def logs(
    common: Common,
    name: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the server exits or Ctrl-C.")
    ] = False,
    url: Annotated[str, _declare_url("LOGS")] = URL,
    api_key: Key = None,
) -> None:
    """Print the end of the log of a model's server."""
    path = f"/logs/{quote(name)}"
    host = _connect(common, url, api_key, silent_s=_PATIENT_S if follow else 15.0)
    if not follow:
        with _explaining(url):
            reply = host.get(path)
        _require_success(host, url, reply.status, reply.body)
        log = reply.body.decode(errors="replace")
        common.out.result({"model": name, "log": log}, Verbatim(log))
        return
    if common.out.format == "json" or common.out.out_file is not None:
        raise UsageError("--follow prints text to stdout only", hint="remove --format and -o")
    # A part may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with _explaining(url):
        for part in host.follow(path + "?follow"):
            _require_success(host, url, part.status, part.body)
            sys.stdout.write(printable(decoder.decode(part.body)))
            sys.stdout.flush()


def reload(common: Common, url: Annotated[str, _declare_url("RELOAD")] = URL, api_key: Key = None) -> None:
    """Make the host read its configuration and client keys again."""
    # The host may look up a bundle for each new model.
    found = _order(_connect(common, url, api_key, wait_s=600), url, "/reload")
    from coldstart.host.configuration import KINDS

    changes = "; ".join(f"{kind} {', '.join(found[kind])}" for kind in KINDS if found.get(kind))
    common.out.result(found, changes or "nothing changed since the host last read its files")


def stop(
    common: Common,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the host has stopped, or return at once.")
    ] = True,
    url: Annotated[str, _declare_url("STOP")] = URL,
    api_key: Key = None,
) -> None:
    """Stop the host as SIGTERM does."""
    host = _connect(common, url, api_key)
    found = _order(host, url, "/stop")
    running = f"running requests: {found['in_flight']}"
    if wait:
        with common.out.phase(f"Stopping, {running}"):
            _await_end(host)
    common.out.result(found, "the host has stopped" if wait else f"the host stops, {running}")


def _await_end(host: "ServerClient") -> None:
    """Return when the host no longer answers."""
    from coldstart.artifacts.net.http_client import RemoteUnreachableError

    with suppress(RemoteUnreachableError):
        while host.get("/health").status:
            time.sleep(_LOOK_S)


def _connect(
    common: Common, url: str, key: str | None, *, wait_s: float = 10.0, silent_s: float = 15.0
) -> "ServerClient":
    from coldstart.commands._client import ServerClient

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return ServerClient(url, headers, common.out, wait_s=wait_s, silent_s=silent_s)


def _order(host: "ServerClient", url: str, path: str) -> dict[str, Any]:
    """Return the response to a POST of an order. Raises CommandFailedError if the host cannot carry it out."""
    with _explaining(url):
        reply = host.post(path, b"{}")
    return _require_success(host, url, reply.status, reply.body)


def _read_status(host: "ServerClient", url: str) -> Mapping[str, Any]:
    with _explaining(url):
        reply = host.get("/status")
    found = _require_success(host, url, reply.status, reply.body)
    if not {"host", "models"} <= found.keys():
        raise _not_a_host(url, reply.status)
    return found


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    from coldstart.artifacts.net.http_client import RemoteUnreachableError

    try:
        yield
    except RemoteUnreachableError as error:
        hint = "coldstart host MODEL..., or --url URL"
        raise CommandFailedError(f"no host responds at {url}: {error.message}", hint=hint) from error


def _require_success(host: "ServerClient", url: str, status: int, body: bytes) -> dict[str, Any]:
    """Return the document of a successful answer; empty if it is not a JSON object.

    Raises:
        CommandFailedError: the host refuses, with its reason, or another server answers.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = {}
    found = found if isinstance(found, dict) else {}
    if status in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
        return found
    if status == HTTPStatus.UNAUTHORIZED:
        raise CommandFailedError(f"{url} requires an API key", hint="--api-key-file FILE")
    error = found.get("error")
    if not isinstance(error, dict) or "message" not in error:
        raise _not_a_host(url, status)
    hint = error.get("hint") or f"coldstart host status --url {url}" + (
        " --api-key-file FILE" if host.has_key else ""
    )
    if status == HTTPStatus.FORBIDDEN:  # the key is that of a client, and `host status` would be refused too
        hint = "--api-key-file FILE with the operator's key, or set admin = true for the client"
    raise CommandFailedError(f"the host refuses: {error['message']}", hint=hint)


def _not_a_host(url: str, status: int) -> CommandFailedError:
    return CommandFailedError(f"{url} is not a host (HTTP status {status})", hint="--url URL")


# Column with figures only where the driver reports them.
_GPU = "GPU memory"
_COLUMNS = (
    "model", "state", "tier", "memory", _GPU, "waiting", "in flight", "requests", "hits", "starts", "last start"
)  # fmt: skip
_PHASES = 3


def watching(ask: Callable[[], Mapping[str, Any]], every_s: float) -> None:
    """Print the status every `every_s` seconds until Ctrl-C, in place on a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        while True:
            print(render(ask()), flush=True)
            time.sleep(every_s)
    with Live(Text(render(ask())), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            live.update(Text(render(ask())), refresh=True)


def render(status: Mapping[str, Any]) -> str:
    """Return three lines about the host, a table of its models, schedules and fallbacks, and the errors of models and host."""
    rows = [_row(model) for model in status["models"]]
    names = [name for name in _COLUMNS if name != _GPU or any(row[_GPU] for row in rows)]
    cells = [[row[name] for name in names] for row in rows]
    lines = [*map(one_line, _head(status)), table(names, cells), *map(one_line, _list_notes(status))]
    return "\n".join(line.rstrip() for line in lines)


def _list_notes(status: Mapping[str, Any]) -> Iterator[str]:
    host, models = status["host"], status["models"]
    for model in models:
        if model.get("next_prewarm_unix_s") is not None:
            at = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(model["next_prewarm_unix_s"]))
            yield f"{model['name']}: prewarm {model['prewarm']}, next {at}"
    for model in models:
        for one in (model["last_start"] or {}).get("fallbacks", ()):
            yield f"{model['name']}: fallback of the last start: {one['section']}: {one['reason']}"
    yield from (f"{model['name']}: {model['error']}" for model in models if model["error"])
    if error := host["config"]["error"]:
        yield f"configuration not applied: {error}"
    if error := host.get("client_keys_error"):
        yield f"client keys not applied, the former ones remain: {error}"
    if error := host.get("runtime_template_error"):
        yield f"no runtime template: {error}"


def _head(status: Mapping[str, Any]) -> list[str]:
    host, requests, starts = status["host"], status["requests"], status["starts"]
    used, limit = format_memory(host["memory_used_bytes"]), format_memory(host["memory_bytes"])
    stopping = ", stopping" if host["stopping"] else ""
    refused = sum(requests["refused"].values())
    template = host.get("runtime_template_bytes", 0)
    own = f", {format_memory(template)} for the runtime template" if template else ""
    return [
        f"{host['url']}  pid {host['pid']}, up {host['uptime_s']:.0f} s, policy {host['policy']}, "
        f"memory {used} of {limit}{own}{stopping}",
        f"requests {requests['total']}, hits {_percent(requests['hit_ratio'])}, waiting {requests['held']}, "
        f"in flight {requests['in_flight']}, rejected {refused}; starts {starts['total']}, failed {starts['failed']}, "
        f"{starts['seconds']:.1f} s in total",
        f"{host['url']}/ui  page of the host for a browser",
        "",
    ]


def _row(model: Mapping[str, Any]) -> dict[str, object]:
    """Return the cells of a model by column."""
    state = model["state"] + (" (pinned)" if model["pinned"] else "")
    if progress := model.get("progress"):  # an earlier host reports none
        state = f"{state}, {progress['text']}"
    memory = format_memory(model["held_bytes"] or model["memory_bytes"])
    gpu_bytes = model.get("gpu_memory_bytes")
    cells = (
        model["name"],
        state,
        model["tier"],
        memory if model["held_bytes"] else f"({memory})",
        "" if gpu_bytes is None else format_memory(gpu_bytes),
        *(model[name] for name in ("held", "in_flight", "requests")),
        _percent(model["hit_ratio"]),
        model["starts"],
        _last(model["last_start"]),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _last(start: Mapping[str, Any] | None) -> str:
    """Return mode and seconds with the longest phases."""
    if start is None:
        return ""
    longest = sorted(start["phases"].items(), key=lambda item: -float(item[1]))[:_PHASES]
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
    return f"{start['mode']} {start['seconds']:.2f} s" + (f" ({phases})" if phases else "")


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


COMMANDS: dict[Callable[..., None], str] = {
    status: "Show the state of a running host. Lists models, tiers, memory, requests and last starts.",
    load: "Start a model without a request.",
    unload: "Stop a model, or all that are not pinned. Running requests end first.",
    logs: "Print the end of a running server's log.",
    reload: "Read host file and client keys again. Prints the changes.",
    stop: "Stop a running host. Running requests end first.",
}
