"""Keep warm processes that fork servers: the runtime imported, or a model's engine built."""

from typing import Annotated, Literal

import typer
from coldstart.artifacts.bundle import anyone
from coldstart.commands._options import READY_TIMEOUT, Common, Model, Untrusted, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import table

from coldstart.errors import Usage

app = group(__doc__)
Level = Literal["runtime", "engine"]
_LEVEL = typer.Option("--level", help="How much to build: the runtime, or the engine with its weights.")


@app.command(help="Start a template and wait until it is ready.")
@declare(takes_vllm_args=True)
def start(
    common: Common,
    model: Model,
    level: Annotated[Level, _LEVEL] = "engine",
    ready_timeout: Annotated[float, READY_TIMEOUT] = 600.0,
    untrusted: Untrusted = False,
) -> None:
    """Start one for the model's bundle."""
    from coldstart.serve import serve, template_pool

    request = serve.ServeRequest(common.look_up(model, None, anyone if untrusted else None))
    plan = serve.plan(request)
    for note in request.lookup.notes:
        common.out.warn(note)
    with common.out.phase(f"start a template ({level})"):
        warm = template_pool.start(level, plan, request.lookup.model.name, ready_timeout)
    data = {"level": level, "model": warm.model, "key": warm.key, "pid": warm.pid}
    common.out.result(data, f"{level} template of {warm.model}, pid {warm.pid}")
    common.out.success("Started a template", then=common.again("serve", model, "--mode", f"template-{level}"))


@app.command(help="List the templates and the servers forked from them.")
@declare()
def status(common: Common) -> None:
    """List them."""
    from coldstart.serve import template_pool

    templates = list(template_pool.listed())
    rows = [
        (w.level, w.model, w.key[7:19], w.pid or "gone", "yes" if w.ready else "no", len(w.servers))
        for w in templates
    ]
    data = {
        "templates": [
            {
                "level": w.level,
                "model": w.model,
                "key": w.key,
                "pid": w.pid,
                "ready": w.ready,
                "servers": w.servers,
            }
            for w in templates
        ]
    }
    common.out.result(data, lambda: table(("level", "model", "key", "pid", "ready", "servers"), rows))


@app.command(help="Stop templates: all, or those of one level.")
@declare()
def stop(
    common: Common,
    level: Annotated[Level | None, typer.Option("--level", help="Only templates of this level.")] = None,
    force: Annotated[bool, typer.Option("--force", help="End the servers forked from them, too.")] = False,
) -> None:
    """Stop them."""
    from coldstart.serve import template_pool

    chosen = [warm for warm in template_pool.listed() if level in (None, warm.level)]
    if not chosen:
        raise Usage("No template runs.", mend="coldstart template start MODEL")
    for warm in chosen:
        template_pool.stop(warm, force=force)
    common.out.result({"stopped": len(chosen)}, f"stopped {len(chosen)}")
