"""Status of a host as a table, printed once or refreshed."""

import io
import time
from collections.abc import Callable, Mapping
from typing import Any

from coldstart.commands import _tables
from coldstart.commands._output import one_line
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from coldstart.units import format_memory

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}
# Column with figures only where the driver reports them.
_GPU = "GPU memory"
_COLUMNS = (
    "model", "state", "tier", "memory", _GPU, "waiting", "in flight", "requests", "hits", "starts", "last start"
)  # fmt: skip
_NUMBERS = frozenset({"memory", _GPU, "waiting", "in flight", "requests", "hits", "starts"})
_PHASES = 3
# Columns of a console that wraps nothing.
_UNLIMITED = 1 << 16


def render(status: Mapping[str, Any]) -> str:
    """Return the status as plain text, with the table within the width of a terminal."""
    out = io.StringIO()
    Console(file=out, width=_UNLIMITED, color_system=None, legacy_windows=False).print(drawn(status))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def watching(ask: Callable[[], Mapping[str, Any]], every_s: float) -> None:
    """Print the status every `every_s` seconds until Ctrl-C, in place on a terminal."""
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        while True:
            print(render(ask()), flush=True)
            time.sleep(every_s)
    with Live(drawn(ask()), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            live.update(drawn(ask()), refresh=True)


def drawn(status: Mapping[str, Any]) -> Group:
    """Return three lines about the host, a table of its models, schedules and fallbacks, and the errors of models and host."""
    table = _draw_table([_row(model) for model in status["models"]])
    failed = [
        Text(one_line(f"{model['name']}: {model['error']}"), style="red")
        for model in status["models"]
        if model["error"]
    ]
    if status["host"]["config"]["error"]:
        failed.append(
            Text(one_line(f"configuration not applied: {status['host']['config']['error']}"), style="red")
        )
    if keys := status["host"].get("client_keys_error"):
        failed.append(Text(one_line(f"client keys not applied, the former ones remain: {keys}"), style="red"))
    if template := status["host"].get("runtime_template_error"):
        failed.append(Text(one_line(f"no runtime template: {template}"), style="yellow"))
    lines = [_schedule(model) for model in status["models"] if model.get("next_prewarm_unix_s") is not None]
    scheduled = [Text(one_line(line)) for line in lines]
    unused = [
        Text(one_line(f"{model['name']}: fallback of the last start: {one['section']}: {one['reason']}"))
        for model in status["models"]
        for one in (model["last_start"] or {}).get("fallbacks", ())
    ]
    return Group(*(Text(one_line(line)) for line in _head(status)), table, *scheduled, *unused, *failed)


def _draw_table(rows: list[dict[str, Text]]) -> Table | Text:
    """Return the table of the models, in its narrow form if it exceeds the width of the terminal."""
    names = [name for name in _COLUMNS if name != _GPU or any(row[_GPU].plain for row in rows)]
    cells = [[row[name].plain for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    width = _tables.find_width()
    if rows and width is not None and sum(widths) + len(_tables.GAP) * (len(names) - 1) > width:
        return Text(_tables.fit(names, cells, [name in _NUMBERS for name in names], width))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _schedule(model: Mapping[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(model["next_prewarm_unix_s"]))
    return f"{model['name']}: prewarm {model['prewarm']}, next {at}"


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


def _row(model: Mapping[str, Any]) -> dict[str, Text]:
    """Return the cells of a model by column."""
    state = model["state"] + (" (pinned)" if model["pinned"] else "")
    if progress := model.get("progress"):  # an earlier host reports none
        state = f"{state}, {progress['text']}"
    memory = format_memory(model["held_bytes"] or model["memory_bytes"])
    gpu_bytes = model.get("gpu_memory_bytes")
    cells = (
        Text(one_line(model["name"])),
        Text(one_line(state), style=_COLOURS.get(model["state"], "")),
        Text(one_line(model["tier"])),
        Text(memory if model["held_bytes"] else f"({memory})"),
        Text("" if gpu_bytes is None else format_memory(gpu_bytes)),
        *(Text(str(model[name])) for name in ("held", "in_flight", "requests")),
        Text(_percent(model["hit_ratio"])),
        Text(str(model["starts"])),
        Text(_last(model["last_start"])),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _last(start: Mapping[str, Any] | None) -> str:
    """Return mode and seconds with the longest phases."""
    if start is None:
        return ""
    longest = sorted(start["phases"].items(), key=lambda item: -float(item[1]))[:_PHASES]
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
    return one_line(f"{start['mode']} {start['seconds']:.2f} s" + (f" ({phases})" if phases else ""))


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"
