"""Status of a host as a table, printed once or refreshed."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coldstart.commands._output import one_line, table

from coldstart.units import format_memory

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
