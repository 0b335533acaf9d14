"""Do a model's cold-start work once, prove the result, and publish it as a bundle."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from coldstart.commands._options import Common, Model, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table

if TYPE_CHECKING:
    from coldstart.api import MaterializationPlan


@declare(takes_vllm_args=True)
def command(
    common: Common,
    model: Model,
    revision: Revision = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made, and for which key.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Make a new version although one is there.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Make this section alone (repeatable).")
    ] = None,
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Freeze a built engine as well (CRIU).")
    ] = False,
    kernels: Annotated[
        Literal["value", "reference"],
        typer.Option("--kernels", help="CUDA kernels: copy their binaries, or refer to them in libraries."),
    ] = "value",
    profile_seconds: Annotated[
        float,
        typer.Option(
            "--profile-seconds", help="How long the iteration profile may take: fewer sizes and rounds."
        ),
    ] = 120.0,
) -> None:
    """Parse, run the offline phase, and print where the bundle is."""
    from coldstart import api
    from coldstart.models import inspection

    options = api.Options(
        only=only or (), force=force, snapshot=snapshot, kernels=kernels, profile_s=profile_seconds
    )
    planned = api.plan_materialization(
        model,
        common.vllm_args,
        options,
        revision=revision,
        offline=common.offline,
        cache_dir=common.cache.root,
    )
    if dry_run:
        _show(common, model, planned)
        return
    if (ahead := planned.estimate()) is not None:
        minutes, size = ahead.seconds / 60, human_bytes(ahead.disk_bytes)
        common.out.note(
            f"by the cost model this takes about {minutes:.0f} minutes and {size} besides weights"
        )
    there = {earlier.digest for earlier in common.store().list()}
    bundle = planned.run(common.out.phase)
    is_new = bundle.digest not in there
    manifest = bundle.manifest
    sections = [(s.type, s.version, s.size, s.digest[7:19]) for s in manifest.sections]
    data: dict[str, object] = {
        "ref": bundle.ref,
        "version": bundle.version,
        "key": bundle.key_digest,
        "size": bundle.size,
    }
    data |= {"made": is_new, "seconds": dict(manifest.provenance.seconds)}
    common.out.result(
        data,
        lambda: table(("section", "version", "bytes", "sha256"), sections) + f"\n{bundle.ref}",
        brief=bundle.ref,
    )
    for section, reason in inspection.list_missing_sections(bundle).items():
        common.out.note(f"no {section}: {reason}")
    for curve, sizes in inspection.list_unprofiled_sizes(bundle).items():
        left = ", ".join(str(size) for size in sizes)
        common.out.note(f"iteration profile: no {curve} of {left}, for want of time (--profile-seconds)")
    common.out.success(
        f"{'Made' if is_new else 'Found'} {bundle.name} v{bundle.version}, {human_bytes(bundle.size)},",
        where="the store",
        then=_next_command(common, model, revision, is_new=is_new),
    )


def _show(common: Common, model: str, planned: "MaterializationPlan") -> None:
    """Render the plan that --dry-run asks for."""
    fields, sections = dict(planned.key.fields), planned.sections
    existing = planned.existing.ref if planned.existing else None
    data: dict[str, object] = {
        "model": planned.lookup.model.name,
        "key": fields,
        "key_digest": planned.key.digest,
    }
    data |= {"sections": list(sections), "existing": existing}
    common.out.result(
        data, lambda: table(("field", "value"), list(fields.items())) + f"\nsections: {', '.join(sections)}"
    )
    common.out.success(f"Would make key {planned.key.short}", then=common.again("materialize", model))


def _next_command(common: Common, model: str, revision: str | None, *, is_new: bool) -> str:
    typed = common.again("serve", model, *(["--revision", revision] if revision else []))
    # Without `--` the newest bundle lends its arguments, which may be another one than was found.
    return typed if is_new or common.vllm_args else f"{typed} --"
