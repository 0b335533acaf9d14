"""Show a bundle, the key of a model on this machine, or why that key misses.

REF is a bundle (NAME, NAME:vN, NAME@sha256:..., or a digest prefix) or else a model; what follows -- are
vLLM's arguments, which are part of a model's key.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.key import Key, Mismatch
from coldstart.commands import _graphs
from coldstart.commands._export import Exports, Result, give
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, public, table

from coldstart.errors import Usage
from coldstart.key import inspection
from coldstart.key.inspection import Lookup

# The columns of what is exported as a table, for each thing that is shown.
SECTION = {"section": "string", "version": "Int64", "size_bytes": "Int64", "digest": "string"}
FIELD = {"field": "string", "value": "string"}
LAYER = {"digest": "string", "size_bytes": "Int64"}
FILE = {"section": "string", "path": "string", "size_bytes": "Int64"}
DIFFERENCE = {"what": "string", "left": "string", "right": "string"}


@dataclass(frozen=True)
class _What:
    """One of them: its heading, its JSON, its table."""

    title: str
    data: Mapping[str, object]
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, object]]


@declare(takes_vllm_args=True, exports=True)
def command(
    common: Common,
    exports: Exports,
    ref: Annotated[str, typer.Argument(metavar="MODEL|REF", help="A model, or the reference of a bundle.")],
    manifest: Annotated[bool, typer.Option("--manifest", help="Print the manifest as it is stored.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="List the files of each section.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Print the fields of the key.")] = False,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="REF2", help="Compare with another bundle.")
    ] = None,
    revision: Revision = None,
) -> None:
    """Choose what to show."""
    if sum((manifest, tree, key, diff is not None)) > 1:
        raise Usage("--manifest, --tree, --key and --diff exclude each other.")
    asks_key = bool(common.vllm_args or revision) or (key and inspection.names_model(ref))
    bundle = None if asks_key else inspection.find_bundle(common.store(), ref)
    if bundle is None:
        lookup = common.look_up(ref, revision)
        if lookup.bundle is None:  # to be looked at, not to be used
            lookup = common.look_up(ref, revision, anyone)
        if key:
            return _show_key(common, exports, lookup.key, lookup)
        if lookup.bundle is None:
            raise inspection.miss(lookup)
        bundle = lookup.bundle
    if key:
        return _show_key(common, exports, bundle.key)
    if manifest:
        return _show_manifest(common, exports, bundle)
    if tree:
        return _show_tree(common, exports, bundle)
    if diff is not None:
        return _show_diff(common, exports, bundle, common.store().get(diff, trust=inspection.trust))
    return _show_bundle(common, exports, bundle)


def _show_bundle(common: Common, exports: Exports, bundle: Bundle) -> None:
    graphs = _graphs_of(bundle)
    data = inspection.describe(bundle) | ({"graphs": graphs} if graphs else {})
    data["not_made"] = inspection.not_made(bundle)
    shown = f"\n\n{_graphs.text(graphs)}" if graphs else ""
    sections = [
        {"section": s.type, "version": s.version, "size_bytes": s.size, "digest": s.digest}
        for s in bundle.manifest.sections
    ]
    what = _What(bundle.ref, data, SECTION, sections)
    _give(common, exports, what, lambda: _bundle_text(bundle) + shown, brief=bundle.digest)


def _graphs_of(bundle: Bundle) -> dict[str, object] | None:
    if not bundle.has("graphs"):
        return None
    from coldstart.graphs import bundles  # numpy

    return bundles.summary(bundle)


def _graph_difference(left: Bundle, right: Bundle) -> dict[str, object] | None:
    if not (left.has("graphs") and right.has("graphs")):
        return None
    from coldstart.graphs import bundles

    return bundles.difference(left, right)


def _bundle_text(bundle: Bundle) -> str:
    manifest, judged = bundle.manifest, inspection.trust(bundle)
    provenance = manifest.provenance
    tools = ", ".join(f"{name} {version}" for name, version in sorted(provenance.tool.items()))
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in provenance.seconds.items())
    head = [
        ("bundle", f"{bundle.name}:v{bundle.version}"),
        ("digest", bundle.digest),
        ("key", manifest.key.digest),
        ("format", manifest.format_version),
        ("size", human_bytes(bundle.size)),
        ("made", f"{provenance.created} with {tools}"),
        ("arguments", " ".join(provenance.arguments) or "none"),
        ("stages", stages or "none"),
        ("trusted", f"{'yes' if judged.ok else 'no'}: {judged.reason}"),
    ]
    head += [(f"no {section}", reason) for section, reason in inspection.not_made(bundle).items()]
    sections = [(s.type, s.version, human_bytes(s.size), s.digest) for s in manifest.sections]
    facts = "\n".join(f"{name:<10} {value}" for name, value in head)
    listed = table(("section", "version", "size", "digest"), sections)
    return f"{facts}\n\n{listed}\n\n{_fields_text(manifest.key)}"


def _show_key(common: Common, exports: Exports, key: Key, lookup: Lookup | None = None) -> None:
    data: dict[str, object] = {"digest": key.digest, "fields": dict(key.fields)}
    if lookup is not None:
        data["bundle"] = lookup.bundle.ref if lookup.bundle else None
        data["nearest"] = lookup.nearest.ref if lookup.nearest else None
        data["mismatches"] = [mismatch._asdict() for mismatch in lookup.mismatches]
    shown = public({"fields": dict(key.fields)})["fields"]  # by name, as long as there are names
    fields = [{"field": name, "value": _plain(value)} for name, value in shown.items()]
    what = _What(f"Key {key.digest}", data, FIELD, fields)
    _give(common, exports, what, lambda: f"{_fields_text(key)}\n\n{_verdict(key, lookup)}", brief=key.digest)


def _verdict(key: Key, lookup: Lookup | None) -> str:
    if lookup is None:
        return f"key {key.digest}"
    if lookup.bundle is not None:
        return f"key {key.digest}\nbundle {lookup.bundle.ref}"
    if lookup.nearest is None:
        return f"key {key.digest}\nno bundle"
    listed = _mismatch_text(lookup.mismatches, "wanted", "found")
    return f"key {key.digest}\nno bundle; the nearest is {lookup.nearest.ref}\n\n{listed}"


def _fields_text(key: Key) -> str:
    return table(("field", "value"), [(name, _plain(value)) for name, value in key.fields.items()])


def _show_manifest(common: Common, exports: Exports, bundle: Bundle) -> None:
    image = json.loads(bundle.image_bytes())
    config = json.loads(bundle.manifest.config())
    data = {"image": image, "config": config}
    layers = [{"digest": one["digest"], "size_bytes": one["size"]} for one in image["layers"]]
    what = _What(f"Manifest of {bundle.ref}", data, LAYER, layers)
    _give(common, exports, what, lambda: json.dumps(data, indent=2))


def _show_tree(common: Common, exports: Exports, bundle: Bundle) -> None:
    trees = inspection.tree(bundle)
    data = {name: [{"path": path, "size": size} for path, size in members] for name, members in trees.items()}
    files = [
        {"section": name, "path": path, "size_bytes": size}
        for name, members in trees.items()
        for path, size in members
    ]
    what = _What(f"Files of {bundle.ref}", {"ref": bundle.ref, "sections": data}, FILE, files)
    _give(common, exports, what, lambda: _tree_text(bundle, trees))


def _tree_text(bundle: Bundle, trees: dict[str, list[tuple[str, int]]]) -> str:
    lines = [f"{bundle.name}:v{bundle.version}"]
    for entry in bundle.manifest.sections:
        lines.append(f"  {entry.type} ({human_bytes(entry.size)})")
        lines += [f"    {path}  {human_bytes(size)}" for path, size in trees.get(entry.type, [])]
    return "\n".join(lines)


def _show_diff(common: Common, exports: Exports, left: Bundle, right: Bundle) -> None:
    fields, sections = inspection.compare(left, right)
    data = {
        "left": left.ref,
        "right": right.ref,
        "equal": not fields and not sections,
        "fields": [{"field": m.field, "left": m.wanted, "right": m.found} for m in fields],
        "sections": [{"section": m.field, "left": m.wanted, "right": m.found} for m in sections],
    }
    graphs = _graph_difference(left, right)
    if graphs is not None:
        data["graphs"] = graphs
    both = [*fields, *sections]
    text = _mismatch_text(both, left.ref, right.ref) if both else "no difference"
    text += f"\n\n{_graphs.diff_text(graphs, left.ref, right.ref)}" if graphs else ""
    differences = [{"what": m.field, "left": _plain(m.wanted), "right": _plain(m.found)} for m in both]
    what = _What(f"{left.ref} and {right.ref}", data, DIFFERENCE, differences)
    _give(common, exports, what, lambda: text)


def _give(
    common: Common, exports: Exports, what: "_What", text: Callable[[], str], *, brief: str | None = None
) -> None:
    rows = public({"rows": what.rows})["rows"]
    give(common.out, exports, Result.of(what.title, public(what.data), what.columns, rows), text, brief=brief)


def _mismatch_text(mismatches: list[Mismatch] | tuple[Mismatch, ...], left: str, right: str) -> str:
    rows = [(m.field, _plain(m.wanted), _plain(m.found)) for m in mismatches]
    return table(("field", left, right), rows)


def _plain(value: object) -> str:
    return "-" if value is None else str(value)
