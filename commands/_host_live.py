"""Subcommands of `coldstart host` that control a running host over HTTP."""

import codecs
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import escape_control_characters, escape_line, format_table

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.units import format_memory

if TYPE_CHECKING:
    from coldstart.commands._client import ServerClient

# Time limit of a load request, in seconds. The host itself limits the duration of a start.
_LOAD_TIMEOUT_S = 7 * 86400.0
_POLL_S = 0.1


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
        help="Name or alias of a model on the host.",
        autocompletion=complete_model,
    ),
]
URL = "http://127.0.0.1:8000"


def register_commands(app: typer.Typer) -> None:
    """Add the subcommands of this module to `app`."""
    functions: tuple[Callable[..., None], ...] = (status, load, unload, logs, reload, stop)
    for function in functions:
        app.command()(declare()(function))


def status(common: Common, url: Annotated[str, _declare_url("STATUS")] = URL, api_key: Key = None) -> None:
    """Show the state of a running host. The output lists models, tiers, memory, requests and last starts."""
    document = _connect(common, url, api_key).call("/status", required_fields={"host", "models"})
    common.out.print_result(document, lambda: render(document))


def load(
    common: Common,
    name: Name,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait until the model is ready, or return immediately."),
    ] = True,
    url: Annotated[str, _declare_url("LOAD")] = URL,
    api_key: Key = None,
) -> None:
    """Start a model before its first request."""
    host = _connect(common, url, api_key, wait_s=_LOAD_TIMEOUT_S)
    with common.out.show_phase(f"Loading {name}"):
        found = host.call(f"/load/{quote(name)}" + ("" if wait else "?wait=false"), {})
    seconds = f" after {found['waited_s']:.1f} s" if "waited_s" in found else ""
    evicted = f"; evicted {', '.join(found['evicted'])}" if found.get("evicted") else ""
    state = "was already ready" if found.get("was_ready") else f"is {found['state']}{seconds}{evicted}"
    common.out.print_result(found, f"{found['model']} {state}")


def unload(
    common: Common,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name or alias of the model; default: all models that are not pinned.",
            autocompletion=complete_model,
        ),
    ] = None,
    url: Annotated[str, _declare_url("UNLOAD")] = URL,
    api_key: Key = None,
) -> None:
    """Stop one model, or all models. Running requests finish first. Pinned models stop only if they are named."""
    found = _connect(common, url, api_key).call("/unload" if name is None else f"/unload/{quote(name)}", {})
    names = ", ".join(found["unloading"])
    common.out.print_result(
        found, f"unloading {names}" if names else f"{name} is not running" if name else "no model to unload"
    )


def logs(
    common: Common,
    name: Name,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Follow the log until the server exits or you press Ctrl-C."),
    ] = False,
    url: Annotated[str, _declare_url("LOGS")] = URL,
    api_key: Key = None,
) -> None:
    """Print or follow the log of a running server."""
    path = f"/logs/{quote(name)}"
    host = _connect(common, url, api_key, silent_s=_LOAD_TIMEOUT_S if follow else 15.0)
    if not follow:
        log = host.read_body(path).decode(errors="replace")
        common.out.print_result({"model": name, "log": log}, log)
        return
    if common.out.format == "json" or common.out.out_file is not None:
        raise UsageError("--follow cannot be combined with --format or -o", hint="omit --format and -o")
    # A chunk may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in host.stream(path + "?follow"):
        sys.stdout.write(escape_control_characters(decoder.decode(chunk)))
        sys.stdout.flush()


def reload(common: Common, url: Annotated[str, _declare_url("RELOAD")] = URL, api_key: Key = None) -> None:
    """Reload the host file and the keys. The changes are printed."""
    # The host may look up a bundle for each new model.
    found = _connect(common, url, api_key, wait_s=600).call("/reload", {})
    from coldstart.host.configuration import CHANGE_KINDS

    changes = "; ".join(f"{kind} {', '.join(found[kind])}" for kind in CHANGE_KINDS if found.get(kind))
    common.out.print_result(found, changes or "nothing changed since the host last read its files")


def stop(
    common: Common,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait until the host has stopped, or return immediately."),
    ] = True,
    url: Annotated[str, _declare_url("STOP")] = URL,
    api_key: Key = None,
) -> None:
    """Stop a running host. Running requests finish first."""
    host = _connect(common, url, api_key)
    found = host.call("/stop", {})
    running = f"running requests: {found['in_flight']}"
    if wait:
        with common.out.show_phase(f"Stopping, {running}"):
            while host.is_responding():
                time.sleep(_POLL_S)
    common.out.print_result(found, "the host has stopped" if wait else f"the host is stopping, {running}")


def _connect(
    common: Common, url: str, key: str | None, *, wait_s: float = 10.0, silent_s: float = 15.0
) -> "ServerClient":
    from coldstart.commands._client import ServerClient

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return ServerClient(url, headers, common.out, wait_s=wait_s, silent_s=silent_s)


# Column that is shown only if the GPU driver reports the memory of a process.
_GPU = "GPU memory"
_COLUMNS = (
    "model", "state", "tier", "memory", _GPU, "waiting", "in flight", "requests", "hits", "starts", "last start"
)  # fmt: skip
_PHASES = 3


def render(status: Mapping[str, Any]) -> str:
    """Format the status of a host as text: the host, a table of its models, then schedules, fallbacks and errors."""
    rows = [_format_row(model) for model in status["models"]]
    names = [name for name in _COLUMNS if name != _GPU or any(row[_GPU] for row in rows)]
    cells = [[row[name] for name in names] for row in rows]
    head, notes = map(escape_line, _format_head(status)), map(escape_line, _list_notes(status))
    lines = [*head, format_table(names, cells), *notes]
    return "\n".join(line.rstrip() for line in lines)


def _list_notes(status: Mapping[str, Any]) -> Iterator[str]:
    host, models = status["host"], status["models"]
    for model in models:
        if model.get("next_prewarm_unix_s") is not None:
            at = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(model["next_prewarm_unix_s"]))
            yield f"{model['name']}: prewarm {model['prewarm']}, next {at}"
    for model in models:
        for fallback in (model["last_start"] or {}).get("fallbacks", ()):
            yield f"{model['name']}: fallback of the last start: {fallback['section']}: {fallback['reason']}"
    yield from (f"{model['name']}: {model['error']}" for model in models if model["error"])
    if error := host["config"]["error"]:
        yield f"configuration not applied: {error}"
    if error := host.get("client_keys_error"):
        yield f"client keys not applied, the previous keys remain valid: {error}"
    if error := host.get("runtime_template_error"):
        yield f"no runtime template: {error}"


def _format_head(status: Mapping[str, Any]) -> list[str]:
    host, requests, starts = status["host"], status["requests"], status["starts"]
    used, limit = format_memory(host["memory_used_bytes"]), format_memory(host["memory_bytes"])
    stopping = ", stopping" if host["stopping"] else ""
    refused = sum(requests["refused"].values())
    template = host.get("runtime_template_bytes", 0)
    template_memory = f", {format_memory(template)} for the runtime template" if template else ""
    return [
        f"{host['url']}  pid {host['pid']}, up {host['uptime_s']:.0f} s, policy {host['policy']}, "
        f"memory {used} of {limit}{template_memory}{stopping}",
        f"requests {requests['total']}, hits {_format_percent(requests['hit_ratio'])}, waiting {requests['held']}, "
        f"in flight {requests['in_flight']}, rejected {refused}; starts {starts['total']}, failed {starts['failed']}, "
        f"{starts['seconds']:.1f} s in total",
        f"{host['url']}/ui  page of the host for a browser",
        "",
    ]


def _format_row(model: Mapping[str, Any]) -> dict[str, object]:
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
        _format_percent(model["hit_ratio"]),
        model["starts"],
        _format_last_start(model["last_start"]),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _format_last_start(start: Mapping[str, Any] | None) -> str:
    """Return the mode, the duration and the longest phases of a start, or an empty string if there was none."""
    if start is None:
        return ""
    longest = sorted(start["phases"].items(), key=lambda item: -float(item[1]))[:_PHASES]
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
    return f"{start['mode']} {start['seconds']:.2f} s" + (f" ({phases})" if phases else "")


def _format_percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"
