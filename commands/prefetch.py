"""Fetch model weights into the memory of this machine before a server starts."""

from typing import Annotated, Any

import typer
from coldstart.artifacts.bundle import accept_any
from coldstart.commands._options import Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import format_bytes, format_table

app = group(__doc__)
_SOURCE = typer.Option(
    "--weights-from",
    metavar="SOURCE",
    help="Source of the weights: http(s)://..., s3://..., hf://REPO@REV or a directory; default: the model's repository.",
)


@app.command(help="Fetch the weights of a model. The prefetcher is started if it is not running.")
@declare(takes_vllm_args=True)
def start(
    common: Common,
    model: Model,
    weights_from: Annotated[str | None, _SOURCE] = None,
    untrusted: Untrusted = False,
) -> None:
    """Fetch the weights, and wait until they are in memory."""
    from coldstart.weights.prefetch import ask

    common.require_network(weights_from or "")
    with common.out.show_phase("look up the model"):
        request = ask.resolve_request(
            model,
            common.vllm_args,
            weights_from=weights_from,
            offline=common.offline,
            cache=common.cache,
            accepts=accept_any if untrusted else None,
        )
    for note in request.notes:
        common.out.warn(note)
    common.require_network(request.source)
    with common.out.show_phase("fetch the weights"):
        stats = ask.fetch_all_files(request)
    ready, total = format_bytes(stats["ready_bytes"]), format_bytes(stats["wanted_bytes"])
    common.out.print_result({"model": request.model, **stats}, f"{request.model}: {ready} of {total} ready")
    common.out.print_success("Fetched weights", then="coldstart prefetch status")


@app.command(help="Show the weights in memory. The output includes the fetch rate and the number of clients.")
@declare()
def status(common: Common) -> None:
    """Print the state of all prefetchers."""
    from coldstart.weights.prefetch import client

    prefetchers = client.request("status")
    data = {"running": bool(prefetchers), "prefetchers": prefetchers}
    common.out.print_result(
        data, lambda: _format_status(prefetchers) if prefetchers else "no prefetcher is running"
    )


def _format_status(prefetchers: list[dict[str, Any]]) -> str:
    rows = [
        (
            prefetcher["source"],
            f"{format_bytes(prefetcher['ready_bytes'])} of {format_bytes(prefetcher['total_bytes'])}",
            f"{format_bytes(prefetcher['bytes_per_s'])}/s" if prefetcher["bytes_per_s"] else "-",
            f"{format_bytes(prefetcher['memory_bytes'])} of {format_bytes(prefetcher['budget_bytes'])}",
            prefetcher["leases"],
            prefetcher["pid"],
        )
        for prefetcher in prefetchers
        if "source" in prefetcher
    ]
    errors = [
        f"{prefetcher['source']}: {error}"
        for prefetcher in prefetchers
        for error in prefetcher.get("errors", ())
    ]
    return "\n".join([format_table(("source", "ready", "rate", "memory", "leases", "pid"), rows), *errors])


@app.command(help="Stop all prefetchers. Weights in use by running servers remain in memory.")
@declare()
def stop(common: Common) -> None:
    """Stop all prefetchers."""
    from coldstart.weights.prefetch import client

    pids = [int(answer["stopped"]) for answer in client.request("stop")]
    text = f"stopped {', '.join(map(str, pids))}" if pids else "no prefetcher is running"
    common.out.print_result({"stopped": pids}, text)
