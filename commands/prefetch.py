"""Fetch weights into this machine's memory before a server starts."""

from typing import Annotated, Any

import typer
from coldstart.artifacts.bundle import anyone
from coldstart.commands._options import Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table

from coldstart.units import parse_size

app = group(__doc__)
_SOURCE = typer.Option(
    "--weights-from",
    metavar="SOURCE",
    help="Source: http(s)://..., s3://..., hf://REPO@REV or a directory; default: the model's repository.",
)
_NAME = typer.Option("--name", metavar="TENSOR", help="Fetch only this tensor; repeatable.")
_MEMORY = typer.Option(
    "--memory",
    metavar="SIZE",
    help="Maximum memory of the prefetcher, such as 60GiB; default: half of the available memory.",
)
_MEMORY_BYTES = typer.Option("--memory-bytes", hidden=True, help="Earlier name of --memory.")
_STREAMS = typer.Option("--streams", help="Number of parallel connections; default: 4.")
_IDLE = typer.Option(
    "--idle",
    metavar="SECONDS",
    help="Time without a client after which the prefetcher ends, in seconds; default: 600.",
)


@app.command(help="Fetch the weights of a model. Starts the prefetcher if none runs.")
@declare(takes_vllm_args=True)
def start(
    common: Common,
    model: Model,
    weights_from: Annotated[str | None, _SOURCE] = None,
    name: Annotated[list[str] | None, _NAME] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    memory_bytes: Annotated[str | None, _MEMORY_BYTES] = None,
    streams: Annotated[int | None, _STREAMS] = None,
    idle: Annotated[float | None, _IDLE] = None,
    untrusted: Untrusted = False,
) -> None:
    """Fetch the weights and wait until they are in memory."""
    from coldstart.weights.prefetch import ask, configuration

    size = memory or memory_bytes
    limit = None if size is None else parse_size(size)
    common.require_network(weights_from or "")
    with common.out.phase("look up"):
        wanted = ask.resolve(
            model,
            common.vllm_args,
            weights_from=weights_from,
            offline=common.offline,
            cache=common.cache,
            accepts=anyone if untrusted else None,
        )
    for note in wanted.notes:
        common.out.warn(note)
    settings = configuration.format_variables(memory_bytes=limit, streams=streams, idle_s=idle)
    common.require_network(wanted.source)
    with common.out.phase("fetch"):
        stats = ask.fetch_all(wanted, name or None, settings)
    text = (
        f"{wanted.model}: {human_bytes(stats['ready_bytes'])} of {human_bytes(stats['wanted_bytes'])} ready"
    )
    common.out.result({"model": wanted.model, **stats}, text)
    common.out.success("Fetched weights", then="coldstart prefetch status")


@app.command(help="Show the weights in memory. Includes the fetch rate and the clients.")
@declare()
def status(common: Common) -> None:
    """Print the status."""
    from coldstart.weights.prefetch import ask

    state = ask.get_status()
    data: dict[str, Any] = {"running": state is not None, **(state or {})}
    common.out.result(data, lambda: _text(state) if state else "no prefetcher is running")


def _text(state: dict[str, Any]) -> str:
    head = (
        f"pid {state['pid']}, {state['streams']} streams, "
        f"{human_bytes(state['memory_bytes'])} of {human_bytes(state['budget_bytes'])} in use"
    )
    rows = [
        (
            model["source"],
            f"{human_bytes(model['ready_bytes'])} of {human_bytes(model['total_bytes'])}",
            f"{human_bytes(model['bytes_per_s'])}/s" if model["bytes_per_s"] else "-",
            model["leases"],
        )
        for model in state["models"]
    ]
    errors = [f"{model['source']}: {error}" for model in state["models"] for error in model["errors"]]
    shown = [table(("source", "ready", "rate", "leases"), rows)] if rows else []
    return "\n".join([head, *shown, *errors])


@app.command(help="Stop the prefetcher. Servers retain the memory that they use.")
@declare()
def stop(common: Common) -> None:
    """Stop the prefetcher."""
    from coldstart.weights.prefetch import ask

    if ask.get_status() is None:
        common.out.result({"stopped": None}, "no prefetcher is running")
        return
    pid = ask.stop()
    common.out.result({"stopped": pid}, f"stopped {pid}")
