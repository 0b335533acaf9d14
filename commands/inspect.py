"""Show a bundle, the key of a model on this machine, or why no bundle matches that key.

REF is a bundle (NAME, NAME:vN, NAME@sha256:..., or a digest prefix) or a model. Arguments after -- go to vLLM and are
part of a model's key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.key import Key, Mismatch, diff
from coldstart.artifacts.manifest import SECTION_TYPES
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, one_line, table

from coldstart.errors import UsageError
from coldstart.models import inspection, resolver
from coldstart.models.inspection import Lookup


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
        typer.Option("--diff", metavar="REF2", help="Reference of another bundle to compare with."),
    ] = None,
    revision: Revision = None,
) -> None:
    """Select the view and print it."""
    if sum((tree, key, diff is not None)) > 1:
        raise UsageError("--tree, --key and --diff exclude each other")
    given = common.vllm_args
    if key and (given or revision or inspection.names_model(ref)):
        lookup = common.look_up(ref, revision)
        if lookup.bundle is None:  # The bundle is only displayed, so it need not be trusted.
            lookup = common.look_up(ref, revision, anyone)
        return _show(common, view_key(lookup.key, lookup))
    bundle = resolver.find_bundle(
        ref, given, cache=common.cache, offline=common.offline, revision=revision, asks_hub=True
    )
    if not given and revision is None:
        common.note_version(ref, bundle.ref)
    if key:
        return _show(common, view_key(bundle.key))
    if tree:
        return _show(common, view_files(bundle))
    if diff is not None:
        return _show(common, view_difference(bundle, common.get_bundle(diff)))
    return _show(common, view_bundle(bundle))


def _show(common: Common, view: "BundleView") -> None:
    common.out.result(view.data, view.text, brief=view.brief)


@dataclass(frozen=True)
class BundleView:
    """One result of `inspect`; `brief` replaces the text under -q."""

    data: Mapping[str, object]
    text: Callable[[], str]
    brief: str | None = None


def view_bundle(bundle: Bundle) -> BundleView:
    """Show everything that the manifest declares, and the CUDA graphs."""
    graphs = _summarize_graphs(bundle)
    data = describe_bundle(bundle) | ({"graphs": graphs} if graphs else {})
    data["not_made"] = inspection.list_missing_sections(bundle)
    return BundleView(data, partial(_render_bundle, bundle, graphs), bundle.digest)


def describe_bundle(bundle: Bundle) -> dict[str, object]:
    """Return everything that the manifest declares, as plain data."""
    manifest, judged = bundle.manifest, inspection.trust(bundle)
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "size": bundle.size,
        "format_version": manifest.format_version,
        "key": {"digest": manifest.key.digest, "fields": dict(manifest.key.fields)},
        "sections": [
            {"type": section.type, "version": section.version, **section.document()}
            for section in manifest.sections
        ],
        "provenance": manifest.provenance.document(),
        "trust": {"ok": judged.ok, "signer": judged.signer, "reason": judged.reason},
    }


def _summarize_graphs(bundle: Bundle) -> Mapping[str, Any] | None:
    if not bundle.has("graphs"):
        return None
    from coldstart.graphs import prove  # numpy

    return prove.summarize(bundle)


def _render_bundle(bundle: Bundle, graphs: Mapping[str, Any] | None) -> str:
    manifest = bundle.manifest
    facts = "\n".join(one_line(f"{name:<10} {value}") for name, value in _list_facts(bundle))
    sections = [(s.type, s.version, human_bytes(s.size), s.digest) for s in manifest.sections]
    listed = table(("section", "version", "size", "digest"), sections)
    shown = [_graphs_text(graphs)] if graphs else []
    return "\n\n".join([facts, listed, _render_fields(manifest.key), *shown])


def _list_facts(bundle: Bundle) -> list[tuple[str, object]]:
    manifest, judged = bundle.manifest, inspection.trust(bundle)
    provenance = manifest.provenance
    tools = ", ".join(f"{name} {version}" for name, version in sorted(provenance.tool.items()))
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in provenance.seconds.items())
    return [
        ("bundle", f"{bundle.name}:v{bundle.version}"),
        ("digest", bundle.digest),
        ("key", manifest.key.digest),
        ("format", manifest.format_version),
        ("size", human_bytes(bundle.size)),
        ("made", f"{provenance.created} with {tools}"),
        ("arguments", " ".join(provenance.arguments) or "none"),
        ("phases", phases or "none"),
        ("proof", _describe_proof(bundle)),
        ("trusted", f"{'yes' if judged.ok else 'no'}: {judged.reason}"),
        *((f"no {section}", reason) for section, reason in inspection.list_missing_sections(bundle).items()),
    ]


def _describe_proof(bundle: Bundle) -> str:
    """Describe the start that verified the bundle; a host reserves its memory, or on a GPU that of the device."""
    if (proof := inspection.read_proof(bundle)) is None:
        return "not recorded"
    device = f", and {human_bytes(proof.device_bytes)} on the device" if proof.device_bytes else ""
    return f"ready in {proof.ready_s:.1f} s with {human_bytes(proof.memory_bytes)} of memory{device}"


def view_key(key: Key, lookup: Lookup | None = None) -> BundleView:
    """Show the fields of a key and, for the key of a model, the bundle that the store has for it."""
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
            listed = _render_mismatches(lookup.mismatches, "wanted", "found")
            lines += [f"no bundle; the most similar is {lookup.nearest.ref}", "", listed]
    return BundleView(data, lambda: "\n".join(lines), key.digest)


def _render_fields(key: Key) -> str:
    return table(("field", "value"), [(name, _plain(value)) for name, value in key.fields.items()])


def view_files(bundle: Bundle) -> BundleView:
    """Show the files of each section that is a tree. Every blob that is read is verified."""
    sections = bundle.manifest.sections
    trees = {
        entry.type: _list_files(bundle, entry.type) for entry in sections if _is_tree(bundle, entry.type)
    }
    lines = [f"{bundle.name}:v{bundle.version}"]
    for entry in sections:
        lines.append(f"  {entry.type} ({human_bytes(entry.size)})")
        lines += [
            f"    {one_line(file['path'])}  {human_bytes(file['size'])}" for file in trees.get(entry.type, ())
        ]
    return BundleView({"ref": bundle.ref, "sections": trees}, lambda: "\n".join(lines))


def _is_tree(bundle: Bundle, section: str) -> bool:
    return bundle.has(section) and SECTION_TYPES[section].encoding == "tar.zst"


def _list_files(bundle: Bundle, section: str) -> list[dict[str, Any]]:
    from coldstart.artifacts import trees

    with bundle.open_blob(section) as reader:
        members = trees.scan(reader, bundle.entry(section))
    return [{"path": one.name, "size": one.size} for one in members if not one.is_directory]


def view_difference(left: Bundle, right: Bundle) -> BundleView:
    """Show the fields of the key and the sections in which two bundles differ."""
    fields, sections = diff(left.key, right.key), _compare_sections(left, right)
    data: dict[str, object] = {
        "left": left.ref,
        "right": right.ref,
        "equal": not fields and not sections,
        "fields": [{"field": m.field, "left": m.wanted, "right": m.found} for m in fields],
        "sections": [{"section": m.field, "left": m.wanted, "right": m.found} for m in sections],
    }
    both = [*fields, *sections]
    text = _render_mismatches(both, left.ref, right.ref) if both else "no difference"
    return BundleView(data, lambda: text)


def _compare_sections(left: Bundle, right: Bundle) -> list[Mismatch]:
    """Return the sections whose content differs, independent of their order."""
    mine, theirs = ({one.type: one.digest for one in bundle.manifest.sections} for bundle in (left, right))
    pairs = [Mismatch(name, mine.get(name), theirs.get(name)) for name in sorted({*mine, *theirs})]
    return [pair for pair in pairs if pair.wanted != pair.found]


def _render_mismatches(mismatches: Sequence[Mismatch], left: str, right: str) -> str:
    rows = [(m.field, _plain(m.wanted), _plain(m.found)) for m in mismatches]
    return table(("field", left, right), rows)


def _plain(value: object) -> str:
    return "-" if value is None else str(value)


def _graphs_text(summary: Mapping[str, Any]) -> str:
    """Return the text of `inspect` for a graphs section."""
    if "error" in summary:
        return f"CUDA graphs: cannot be read: {summary['error']}"
    proof, refused = summary["proof"], summary["refused"]
    rows = [
        ("graphs", f"{summary['graphs']}; {len(refused)} more are captured at every start"),
        ("nodes", f"{summary['nodes']}: {_counts(summary['nodes_by_kind'])}"),
        ("edges", summary["edges"]),
        ("relocations", f"{summary['relocations']}: {_counts(summary['relocations_by_region'])}"),
        ("bytes", f"{human_bytes(summary['bytes_on_disk'])} unpacked"),
        ("proof", f"{proof['graphs']} graphs" if proof else "none"),
    ]
    facts = "CUDA graphs\n" + "\n".join(f"{name:<11} {value}" for name, value in rows)
    reasons = [table(("captured at every start", "reason"), sorted(refused.items()))] if refused else []
    return "\n\n".join([facts, *reasons])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
