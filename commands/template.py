"""Manage templates: warm processes that fork servers, frozen runtimes, and engines in vLLM's sleep mode."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from coldstart.commands import _serving
from coldstart.commands._options import READY_TIMEOUT, Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import format_bytes, format_table

from coldstart.errors import CommandFailedError

app = group(__doc__)
Level = Literal["runtime", "engine", "asleep-1", "asleep-2", "parked"]
_SHOWN = ("level", "model", "key", "pid", "ready", "servers")
_LEVEL = typer.Option(
    "--level",
    help="State to keep warm: runtime (Python imports done), engine (engine built), asleep-1 or asleep-2 (engine on its GPU,"
    " at vLLM sleep level 1 or 2), or parked (like asleep-1, but with nothing left on the GPU).",
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
    """Start a template from the model's bundle, and wait until it is ready."""
    from coldstart.launch import planning, preparation
    from coldstart.launch.planning import ServeRequest

    lookup = _serving.look_up_model(common, model, None, untrusted=untrusted)
    request = ServeRequest(lookup)
    plan = planning.plan(request)
    for note in request.lookup.notes:
        common.out.warn(note)
    with common.out.show_phase(f"start a template ({level})"):
        warm = preparation.start_template(level, plan, request.lookup.model.name, ready_timeout)
    mode = preparation.find_mode(level).name
    data = {"level": level, "model": warm.model, "key": warm.key, "pid": warm.pid}
    common.out.print_result(data, f"{level} template of {warm.model}, pid {warm.pid}")
    common.out.print_success("Started a template", then=common.format_command("serve", model, "--mode", mode))


@app.command(help="Save the imported runtime with CRIU. Any model can start from it.")
@declare()
def freeze(
    common: Common,
    force: Annotated[
        bool, typer.Option("--force", help="Write a new image even if a matching image exists.")
    ] = False,
    ready_timeout: Annotated[float, READY_TIMEOUT] = 600.0,
) -> None:
    """Write a CRIU image of a process that has imported vLLM, unless a matching image exists."""
    from coldstart.launch import process_snapshot
    from coldstart.launch.modes import RUNTIME_SNAPSHOT
    from coldstart.system.snapshot import runtime_image

    directory = process_snapshot.find_runtime(common.cache)
    is_new = force or directory is None or runtime_image.describe_image(directory).obstacle is not None
    if directory is None or is_new:
        if why := RUNTIME_SNAPSHOT.find_unusable_reason():
            raise CommandFailedError(f"cannot freeze the runtime: {why.reason}", hint=why.hint)
        with common.out.show_phase("freeze the imported runtime"):
            directory = process_snapshot.freeze_runtime(common.cache, ready_timeout)
    image = runtime_image.describe_image(directory)
    data = {**asdict(image), "made_now": is_new}
    common.out.print_result(data, f"{image.directory}  {format_bytes(image.size)}")
    verb = "Froze" if is_new else "Found"
    common.out.print_success(
        f"{verb} the runtime", then=f"coldstart serve MODEL --mode {RUNTIME_SNAPSHOT.name}, or just serve"
    )


@app.command(help="Remove frozen runtimes.")
@declare()
def discard(common: Common) -> None:
    """Remove all frozen runtimes from the cache directory."""
    from coldstart.system.snapshot import runtime_image

    images = list(runtime_image.list_images(common.cache.runtimes))
    if not images:
        common.out.print_note("no frozen runtime exists in the cache directory")
    for image in images:
        runtime_image.remove_image(image.directory)
    freed = sum(image.size for image in images)
    common.out.print_result({"discarded": len(images), "freed_bytes": freed}, f"discarded {len(images)}")


@app.command(
    help="List templates and frozen runtimes. Each template is shown with the servers forked from it."
)
@declare()
def status(common: Common) -> None:
    """Print templates, servers and frozen runtimes."""
    from coldstart.launch import template_pool
    from coldstart.system.snapshot import runtime_image

    templates = list(template_pool.list_templates())
    images = list(runtime_image.list_images(common.cache.runtimes))
    rows = [
        (w.level, w.model, w.key[7:19], w.pid or "exited", "yes" if w.ready else "no", len(w.servers))
        for w in templates
    ]
    for image in images:
        ready = "yes" if image.obstacle is None else f"no: {image.obstacle}"
        rows.append(("frozen", f"every model, {format_bytes(image.size)}", "-", "-", ready, 0))
    data = {
        "templates": [{name: getattr(w, name) for name in _SHOWN} for w in templates],
        "frozen": [asdict(image) for image in images],
    }
    common.out.print_result(data, lambda: format_table(_SHOWN, rows))


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

    selected = [warm for warm in template_pool.list_templates() if level in (None, warm.level)]
    if not selected:
        common.out.print_note("no template is running")
    for warm in selected:
        template_pool.stop_template(warm, force=force)
    common.out.print_result({"stopped": len(selected)}, f"stopped {len(selected)}")
