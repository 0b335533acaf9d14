"""Do a model's cold-start work once, prove the result, and publish it as a bundle."""

from typing import Annotated, Literal

import typer
from coldstart.commands._options import Common, Model, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table


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
    from coldstart.materialize import expectation, materialize
    from coldstart.materialize.options import Options
    from coldstart.models import inspection

    options = Options(
        only=only or (), force=force, snapshot=snapshot, kernels=kernels, profile_s=profile_seconds
    )
    planned = common.look_up(model, revision)
    if dry_run:
        existing = planned.bundle.ref if planned.bundle else None
        data: dict[str, object] = {"model": planned.model.name, "key": dict(planned.key.fields)}
        data |= {"key_digest": planned.key.digest, "sections": list(options.sections), "existing": existing}
        rows = [(name, value) for name, value in planned.key.fields.items()]
        common.out.result(
            data, lambda: table(("field", "value"), rows) + f"\nsections: {', '.join(options.sections)}"
        )
        common.out.success(f"Would make key {planned.key.short}", then=common.again("materialize", model))
        return
    if (planned.bundle is None or force) and (ahead := expectation.expected(planned, options)) is not None:
        minutes, size = ahead.seconds / 60, human_bytes(ahead.disk_bytes)
        common.out.note(
            f"by the cost model this takes about {minutes:.0f} minutes and {size} besides weights"
        )
    there = {earlier.digest for earlier in common.store().list()}
    bundle = materialize.materialize(planned, options, common.out.phase)
    is_new = bundle.digest not in there
    manifest = bundle.manifest
    sections = [(s.type, s.version, s.size, s.digest[7:19]) for s in manifest.sections]
    data = {"ref": bundle.ref, "version": bundle.version, "key": bundle.key_digest, "size": bundle.size}
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
        then=common.again("serve", model),
    )
