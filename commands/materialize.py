"""Build the bundle of a model, verify it by starting a server from it, and publish it in the store."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._options import Common, Model, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import format_bytes, format_table

from coldstart.materialize.options import Options
from coldstart.scheduling.declaration import list_settings

if TYPE_CHECKING:
    from coldstart.api import MaterializationPlan


@declare(takes_vllm_args=True, options=Options())
def command(
    common: Common,
    options: dict[str, Any],
    model: Model,
    revision: Revision = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the sections and the key of the bundle without building it."),
    ] = False,
) -> None:
    """Build the bundle and print its reference."""
    from coldstart import api
    from coldstart.models import inspection

    planned = api.plan_materialization(
        model,
        common.vllm_args,
        Options(**options),
        revision=revision,
        offline=common.offline,
        cache_dir=common.cache.root,
    )
    if dry_run:
        _show_plan(common, model, planned)
        return
    earlier_digests = {earlier.digest for earlier in common.store().list_bundles()}
    bundle = planned.run(common.out.show_phase)
    is_new = bundle.digest not in earlier_digests
    manifest = bundle.manifest
    sections = [(s.section_type, s.section_version, s.size, s.digest[7:19]) for s in manifest.sections]
    data: dict[str, object] = {
        "ref": bundle.ref,
        "version": bundle.version,
        "key": bundle.key_digest,
        "size": bundle.size_bytes,
    }
    data |= {"made": is_new, "seconds": dict(manifest.provenance.seconds)}
    common.out.print_result(
        data,
        lambda: format_table(("section", "version", "bytes", "sha256"), sections) + f"\n{bundle.ref}",
        brief=bundle.ref,
    )
    for section, reason in inspection.list_missing_sections(bundle).items():
        common.out.print_note(f"no {section}: {reason}")
    common.out.print_success(
        f"{'Built' if is_new else 'Found'} {bundle.name} v{bundle.version}, {format_bytes(bundle.size_bytes)},",
        where="the store",
        then=_next_command(common, model, revision, is_new=is_new),
    )


def _show_plan(common: Common, model: str, planned: "MaterializationPlan") -> None:
    from coldstart.models import resolution

    fields, sections = dict(planned.key.fields), planned.sections
    existing = planned.existing.ref if planned.existing else None
    data: dict[str, object] = {
        "model": planned.lookup.model.name,
        "key": fields,
        "key_digest": planned.key.digest,
    }
    data |= {"sections": list(sections), "existing": existing}
    data["downloads"] = downloads = resolution.list_missing_files(planned.lookup.model)
    lines = [
        f"sections: {', '.join(sections)}",
        *([f"download: {', '.join(downloads)}"] if downloads else []),
    ]
    common.out.print_result(
        data, lambda: "\n".join([format_table(("field", "value"), list(fields.items())), *lines])
    )
    flags = [one.flag for name, one in list_settings(Options) if getattr(planned.options, name) is True]
    common.out.print_success(
        f"Would build key {planned.key.short_digest}",
        then=common.format_command("materialize", model, *flags),
    )


def _next_command(common: Common, model: str, revision: str | None, *, is_new: bool) -> str:
    command = common.format_command("serve", model, *(["--revision", revision] if revision else []))
    # Without `--`, serve uses the arguments of the newest bundle, which may be a different one.
    return command if is_new or common.vllm_args else f"{command} --"
