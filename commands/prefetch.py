"""Fetch weights into this machine's memory before a server starts."""

from typing import Annotated, Any

import typer
from coldstart.artifacts.bundle import accept_any
from coldstart.commands._options import Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table

app = group(__doc__)
_SOURCE = typer.Option(
    "--weights-from",
    metavar="SOURCE",
    help="Source: http(s)://..., s3://..., hf://REPO@REV or a directory; default: the model's repository.",
)


@app.command(help="Fetch the weights of a model. Starts the prefetcher if none runs.")
@declare(takes_vllm_args=True)
def start(
    common: Common,
    model: Model,
    weights_from: Annotated[str | None, _SOURCE] = None,
    untrusted: Untrusted = False,
) -> None:
    """Fetch the weights and wait until they are in memory."""
    from coldstart.weights.prefetch import ask

    common.require_network(weights_from or "")
    with common.out.phase("look up"):
        wanted = ask.resolve(
            model,
            common.vllm_args,
            weights_from=weights_from,
            offline=common.offline,
            cache=common.cache,
            accepts=accept_any if untrusted else None,
        )
    for note in wanted.notes:
        common.out.warn(note)
    common.require_network(wanted.source)
    with common.out.phase("fetch"):
        stats = ask.fetch_all(wanted)
    text = (
        f"{wanted.model}: {human_bytes(stats['ready_bytes'])} of {human_bytes(stats['wanted_bytes'])} ready"
    )
    common.out.result({"model": wanted.model, **stats}, text)
    common.out.success("Fetched weights", then="coldstart prefetch status")


@app.command(help="Show the weights in memory. Includes the fetch rate and the clients.")
@declare()
def status(common: Common) -> None:
    """Print the status."""
    from coldstart.weights.prefetch import client

    prefetchers = client.request("status")
    data = {"running": bool(prefetchers), "prefetchers": prefetchers}
    common.out.result(data, lambda: _text(prefetchers) if prefetchers else "no prefetcher is running")


def _text(prefetchers: list[dict[str, Any]]) -> str:
    rows = [
        (
            one["source"],
            f"{human_bytes(one['ready_bytes'])} of {human_bytes(one['total_bytes'])}",
            f"{human_bytes(one['bytes_per_s'])}/s" if one["bytes_per_s"] else "-",
            f"{human_bytes(one['memory_bytes'])} of {human_bytes(one['budget_bytes'])}",
            one["leases"],
            one["pid"],
        )
        for one in prefetchers
        if "source" in one
    ]
    errors = [f"{one['source']}: {error}" for one in prefetchers for error in one.get("errors", ())]
    return "\n".join([table(("source", "ready", "rate", "memory", "leases", "pid"), rows), *errors])


@app.command(help="Stop all prefetchers. Servers retain the memory that they use.")
@declare()
def stop(common: Common) -> None:
    """Stop all prefetchers."""
    from coldstart.weights.prefetch import client

    pids = [int(answer["stopped"]) for answer in client.request("stop")]
    text = f"stopped {', '.join(map(str, pids))}" if pids else "no prefetcher is running"
    common.out.result({"stopped": pids}, text)
