"""Show a bundle, the key of a model on this machine, or why no bundle matches that key.

REF is a bundle reference: NAME, NAME:vN, NAME@sha256:... or the beginning of a digest. Arguments after -- go to vLLM and are
part of the key of a model.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.key import FieldMismatch, Key, compare_keys
from coldstart.artifacts.manifest import SECTION_TYPES
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import escape_line, format_bytes, format_table

from coldstart.errors import UsageError
from coldstart.models import inspection, resolution, resolver
from coldstart.models.inspection import BundleLookup


@declare(takes_vllm_args=True)
def command(
    common: Common,
    ref: Annotated[
        str,
        typer.Argument(metavar="MODEL|REF", help="Model or bundle reference.", autocompletion=complete_model),
    ],
    tree: Annotated[bool, typer.Option("--tree", help="List the files of each section.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Print the fields of the bundle key.")] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="REF2", help="Reference of a second bundle to compare with this one."),
    ] = None,
    revision: Revision = None,
) -> None:
    """Print the view of a bundle or a key that the options select."""
    if sum((tree, key, diff is not None)) > 1:
        raise UsageError("--tree, --key and --diff cannot be combined", hint="use only one of these options")
    vllm_args = common.vllm_args
    if key and (vllm_args or revision or resolution.is_known_model(ref)):
        lookup = common.look_up(ref, revision)
        if lookup.bundle is None:  # The bundle is only displayed, so it need not be trusted.
            lookup = common.look_up(ref, revision, accept_any)
        _show_key(common, lookup.key, lookup)
        return
    bundle = resolver.find_bundle(
        ref, vllm_args, cache=common.cache, offline=common.offline, revision=revision, asks_hub=True
    )
    if not vllm_args and revision is None:
        common.print_version_note(ref, bundle.ref)
    if key:
        _show_key(common, bundle.key)
    elif tree:
        show_files(common, bundle)
    elif diff is not None:
        _show_difference(common, bundle, common.get_bundle(diff))
    else:
        show_bundle(common, bundle)


def show_bundle(common: Common, bundle: Bundle) -> None:
    """Print the contents of the manifest and a summary of the CUDA graphs."""
    graphs = None
    if bundle.has_section("graphs"):
        from coldstart.graphs import prove  # numpy

        graphs = prove.summarize(bundle)
    data = describe_bundle(bundle) | ({"graphs": graphs} if graphs else {})
    data["not_made"] = inspection.list_missing_sections(bundle)

    def render() -> str:
        manifest = bundle.manifest
        facts = "\n".join(escape_line(f"{name:<10} {value}") for name, value in _list_facts(bundle))
        rows = [
            (s.section_type, s.section_version, format_bytes(s.size), s.digest) for s in manifest.sections
        ]
        sections = format_table(("section", "version", "size", "digest"), rows)
        graphs_text = [_render_graphs(graphs)] if graphs else []
        return "\n\n".join([facts, sections, _render_fields(manifest.key), *graphs_text])

    common.out.print_result(data, render, brief=bundle.digest)


def describe_bundle(bundle: Bundle) -> dict[str, object]:
    """Return the bundle's identity, its manifest contents and the result of the trust check as a JSON document."""
    manifest, trust = bundle.manifest, inspection.trust(bundle)
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "size": bundle.size_bytes,
        "format_version": manifest.format_version,
        "key": {"digest": manifest.key.digest, "fields": dict(manifest.key.fields)},
        "sections": [
            {"type": section.section_type, "version": section.section_version, **section.to_document()}
            for section in manifest.sections
        ],
        "provenance": manifest.provenance.to_document(),
        "trust": trust.to_document(),
    }


def _list_facts(bundle: Bundle) -> list[tuple[str, object]]:
    manifest, trust = bundle.manifest, inspection.trust(bundle)
    provenance = manifest.provenance
    tools = ", ".join(f"{name} {version}" for name, version in sorted(provenance.tool.items()))
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in provenance.seconds.items())
    verification = "not recorded"
    if (start := inspection.read_verification_start(bundle)) is not None:
        device = f", and {format_bytes(start.device_bytes)} on the device" if start.device_bytes else ""
        for state, size in (
            ("of weights", start.weights_bytes),
            ("of KV cache for one request", start.kv_floor_bytes),
            ("at least", start.device_floor_bytes),
            ("asleep", start.asleep_bytes),
            ("parked", start.parked_bytes),
        ):
            device += "" if size is None else f", {format_bytes(size)} {state}"
        memory = format_bytes(start.memory_bytes)
        verification = f"ready in {start.ready_s:.1f} s with {memory} of memory{device}"
    return [
        ("bundle", f"{bundle.name}:v{bundle.version}"),
        ("digest", bundle.digest),
        ("key", manifest.key.digest),
        ("format", manifest.format_version),
        ("size", format_bytes(bundle.size_bytes)),
        ("built", f"{provenance.created} with {tools}"),
        ("arguments", " ".join(provenance.arguments) or "none"),
        ("phases", phases or "none"),
        ("test start", verification),
        ("trusted", f"{'yes' if trust.is_trusted else 'no'}: {trust.reason}"),
        *((f"no {section}", reason) for section, reason in inspection.list_missing_sections(bundle).items()),
    ]


def _show_key(common: Common, key: Key, lookup: BundleLookup | None = None) -> None:
    """Print the fields of a key and, after a model was looked up, the matching or the most similar bundle."""
    data: dict[str, object] = {"digest": key.digest, "fields": dict(key.fields)}
    lines = [_render_fields(key), "", f"key {key.digest}"]
    if lookup is not None:
        data["bundle"] = lookup.bundle.ref if lookup.bundle else None
        data["nearest"] = lookup.nearest.ref if lookup.nearest else None
        data["mismatches"] = [mismatch._asdict() for mismatch in lookup.mismatches]
        if lookup.bundle is not None:
            lines.append(f"bundle {lookup.bundle.ref}")
        elif lookup.nearest is None:
            lines.append("no bundle")
        else:
            differences = _render_mismatches(lookup.mismatches, "wanted", "found")
            lines += [f"no bundle; the most similar is {lookup.nearest.ref}", "", differences]
    common.out.print_result(data, "\n".join(lines), brief=key.digest)


def _render_fields(key: Key) -> str:
    return format_table(
        ("field", "value"), [(name, _format_value(value)) for name, value in key.fields.items()]
    )


def show_files(common: Common, bundle: Bundle) -> None:
    """Print the files of each section that is a file tree, and verify the digest of each blob that is read."""
    from coldstart.artifacts import trees

    files: dict[str, list[dict[str, Any]]] = {}
    lines = [f"{bundle.name}:v{bundle.version}"]
    for entry in bundle.manifest.sections:
        lines.append(f"  {entry.section_type} ({format_bytes(entry.size)})")
        if bundle.has_section(entry.section_type) and SECTION_TYPES[entry.section_type].encoding == "tar.zst":
            with bundle.open_section(entry.section_type) as reader:
                members = [member for member in trees.read_tree(reader, entry) if not member.is_directory]
            files[entry.section_type] = [{"path": member.name, "size": member.size} for member in members]
            lines += [f"    {escape_line(member.name)}  {format_bytes(member.size)}" for member in members]
    common.out.print_result({"ref": bundle.ref, "sections": files}, "\n".join(lines))


def _show_difference(common: Common, left: Bundle, right: Bundle) -> None:
    """Print the key fields and the sections in which two bundles differ; the order of sections is ignored."""
    fields = compare_keys(left.key, right.key)
    left_digests, right_digests = (
        {section.section_type: section.digest for section in bundle.manifest.sections}
        for bundle in (left, right)
    )
    names = sorted({*left_digests, *right_digests})
    pairs = (FieldMismatch(name, left_digests.get(name), right_digests.get(name)) for name in names)
    sections = [pair for pair in pairs if pair.wanted != pair.found]
    data: dict[str, object] = {
        "left": left.ref,
        "right": right.ref,
        "equal": not fields and not sections,
        "fields": [{"field": m.field, "left": m.wanted, "right": m.found} for m in fields],
        "sections": [{"section": m.field, "left": m.wanted, "right": m.found} for m in sections],
    }
    both = [*fields, *sections]
    common.out.print_result(data, _render_mismatches(both, left.ref, right.ref) if both else "no difference")


def _render_mismatches(mismatches: Sequence[FieldMismatch], left: str, right: str) -> str:
    rows = [(m.field, _format_value(m.wanted), _format_value(m.found)) for m in mismatches]
    return format_table(("field", left, right), rows)


def _format_value(value: object) -> str:
    return "-" if value is None else str(value)


def _render_graphs(summary: Mapping[str, Any]) -> str:
    if "error" in summary:
        return f"CUDA graphs: cannot be read: {summary['error']}"
    proof, refused = summary["proof"], summary["refused"]
    rows = [
        ("graphs", f"{summary['graphs']}; {len(refused)} more are captured at every start"),
        ("nodes", f"{summary['nodes']}: {_format_counts(summary['nodes_by_kind'])}"),
        ("edges", summary["edges"]),
        ("relocations", f"{summary['relocations']}: {_format_counts(summary['relocations_by_region'])}"),
        ("bytes", f"{format_bytes(summary['bytes_on_disk'])} unpacked"),
        ("proof", f"{proof['graphs']} graphs" if proof else "none"),
    ]
    facts = "CUDA graphs\n" + "\n".join(f"{name:<11} {value}" for name, value in rows)
    reasons = (
        [format_table(("captured at every start", "reason"), sorted(refused.items()))] if refused else []
    )
    return "\n\n".join([facts, *reasons])


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
