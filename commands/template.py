"""Manage warm processes that fork servers, the frozen runtime, and engines in sleep mode."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from coldstart.commands import _serving
from coldstart.commands._options import READY_TIMEOUT, Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table

from coldstart.errors import CommandFailedError

app = group(__doc__)
Level = Literal["runtime", "engine", "asleep-1", "asleep-2", "parked"]
_SHOWN = ("level", "model", "key", "pid", "ready", "servers")
_LEVEL = typer.Option(
    "--level",
    help="What it holds: runtime (imports), engine (a built engine), asleep-1 or asleep-2 (vLLM's sleep levels on a GPU), "
    "parked (asleep-1 that leaves nothing on the GPU).",
)


@app.command(help="Start a template and wait until it is ready.")
@declare(takes_vllm_args=True)
def start(
    common: Common,
    model: Model,
    level: Annotated[Level, _LEVEL] = "engine",
    ready_timeout: Annotated[float, READY_TIMEOUT] = 600.0,
    untrusted: Untrusted = False,
) -> None:
    """Start a template for the model's bundle."""
    from coldstart.launch import planning, preparation
    from coldstart.launch.planning import ServeRequest

    lookup = _serving.find(common, model, None, untrusted=untrusted)
    request = ServeRequest(lookup)
    plan = planning.plan(request)
    for note in request.lookup.notes:
        common.out.warn(note)
    with common.out.phase(f"start a template ({level})"):
        warm = preparation.start_template(level, plan, request.lookup.model.name, ready_timeout)
    mode = preparation.find_mode(level).name
    data = {"level": level, "model": warm.model, "key": warm.key, "pid": warm.pid}
    common.out.result(data, f"{level} template of {warm.model}, pid {warm.pid}")
    common.out.success("Started a template", then=common.format_command("serve", model, "--mode", mode))


@app.command(help="Write the imported runtime with CRIU. Starts of any model can restore it.")
@declare()
def freeze(
    common: Common,
    force: Annotated[
        bool, typer.Option("--force", help="Write a new image even if a matching one exists.")
    ] = False,
    ready_timeout: Annotated[float, READY_TIMEOUT] = 600.0,
) -> None:
    """Write the image unless a matching one exists."""
    from coldstart.launch import process_snapshot
    from coldstart.launch.modes import RUNTIME_SNAPSHOT
    from coldstart.system.snapshot import runtime_image

    there = process_snapshot.find_runtime(common.cache)
    is_new = force or there is None or runtime_image.described(there).obstacle is not None
    if there is None or is_new:
        if why := RUNTIME_SNAPSHOT.unavailable():
            raise CommandFailedError(f"cannot freeze the runtime: {why.reason}", hint=why.hint)
        with common.out.phase("freeze the imported runtime"):
            there = process_snapshot.freeze_runtime(common.cache, ready_timeout)
    image = runtime_image.described(there)
    data = {**asdict(image), "made_now": is_new}
    common.out.result(data, f"{image.directory}  {human_bytes(image.size)}")
    verb = "Froze" if is_new else "Found"
    common.out.success(
        f"{verb} the runtime", then=f"coldstart serve MODEL --mode {RUNTIME_SNAPSHOT.name}, or just serve"
    )


@app.command(help="Remove frozen runtimes.")
@declare()
def discard(common: Common) -> None:
    """Remove every frozen runtime below the cache root."""
    from coldstart.system.snapshot import runtime_image

    images = list(runtime_image.listed(common.cache.runtimes))
    if not images:
        common.out.note("no frozen runtime exists here")
    for image in images:
        runtime_image.discard(image.directory)
    freed = sum(image.size for image in images)
    common.out.result({"discarded": len(images), "freed_bytes": freed}, f"discarded {len(images)}")


@app.command(help="List templates and frozen runtimes. Includes the servers forked from a template.")
@declare()
def status(common: Common) -> None:
    """Print templates, servers and frozen runtimes."""
    from coldstart.launch import template_pool
    from coldstart.system.snapshot import runtime_image

    templates = list(template_pool.listed())
    images = list(runtime_image.listed(common.cache.runtimes))
    rows = [
        (w.level, w.model, w.key[7:19], w.pid or "gone", "yes" if w.ready else "no", len(w.servers))
        for w in templates
    ]
    for image in images:
        ready = "yes" if image.obstacle is None else f"no: {image.obstacle}"
        rows.append(("frozen", f"every model, {human_bytes(image.size)}", "-", "-", ready, 0))
    data = {
        "templates": [{name: getattr(w, name) for name in _SHOWN} for w in templates],
        "frozen": [asdict(image) for image in images],
    }
    common.out.result(data, lambda: table(_SHOWN, rows))


@app.command(help="Stop all templates, or those of one level.")
@declare()
def stop(
    common: Common,
    level: Annotated[
        Level | None, typer.Option("--level", help="Level of the templates to stop; default: all levels.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also stop the servers forked from these templates.")
    ] = False,
) -> None:
    """Stop the selected templates."""
    from coldstart.launch import template_pool

    chosen = [warm for warm in template_pool.listed() if level in (None, warm.level)]
    if not chosen:
        common.out.note("no template is running")
    for warm in chosen:
        template_pool.stop(warm, force=force)
    common.out.result({"stopped": len(chosen)}, f"stopped {len(chosen)}")
