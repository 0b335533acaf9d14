"""CUDA graphs of a bundle, and the differences between those of two bundles, as text."""

from collections.abc import Mapping
from typing import Any

from coldstart.commands._output import human_bytes, table

NAME, SHOWN = 48, 6


def text(summary: Mapping[str, Any]) -> str:
    """Return the text of `inspect` for a graphs section."""
    if "error" in summary:
        return f"CUDA graphs: cannot be read: {summary['error']}"
    blocks = [_facts(summary), _kernels(summary["kernels"])]
    if summary["refused"]:
        blocks.append(table(("captured at every start", "reason"), sorted(summary["refused"].items())))
    return "\n\n".join(blocks)


def _facts(summary: Mapping[str, Any]) -> str:
    proof = summary["proof"]
    eager = "with eager outputs too" if proof and proof["eager"] else "captured and restored outputs alone"
    rows = [
        ("graphs", f"{summary['graphs']}; {len(summary['refused'])} more are captured at every start"),
        ("nodes", f"{summary['nodes']}: {_counts(summary['nodes_by_kind'])}"),
        ("edges", f"{summary['edges']}, {summary['edges_with_data']} with data"),
        ("relocations", f"{summary['relocations']}: {_counts(summary['relocations_by_region'])}"),
        ("tensor maps", f"{summary['relocations_of_tensor_maps']} of the relocations"),
        ("unstable", f"{summary['unstable_bytes']} parameter bytes that no kernel reads"),
        ("contents", human_bytes(summary["contents_bytes"])),
        (
            "bytes",
            f"{human_bytes(summary['bytes_on_disk'])} unpacked, {summary['bytes_per_node']} a node in tables",
        ),
        (
            "proof",
            f"{proof['graphs']} graphs, {len(proof['seeds'])} inputs each, {eager}" if proof else "none",
        ),
    ]
    return "CUDA graphs\n" + "\n".join(f"{name:<11} {value}" for name, value in rows)


def _kernels(kernels: list[Mapping[str, Any]]) -> str:
    return table(("kernel", "nodes"), [(k["name"][:NAME], k["uses"]) for k in kernels])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def diff_text(difference: Mapping[str, Any], left: str, right: str) -> str:
    """Return the text of `inspect --diff` for two graphs sections."""
    lines = [
        f"{name.removesuffix('_only')} only in {ref}: {_some(items)}"
        for name in ("graphs_only", "kernels_only", "regions_only", "refused_only")
        for ref, items in zip((left, right), difference[name], strict=True)
        if items
    ]
    changed = [
        (key, *(rows.get(n, 0) for n in CHANGES)) for key, rows in difference["graphs_changed"].items()
    ]
    listed = [table(("graph that differs in", *CHANGES), changed)] if changed else []
    return "\n".join([*lines, *listed]) or "the CUDA graphs differ only in bytes that no kernel reads"


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


CHANGES = ("nodes", "edges", "relocations", "parameter_bytes")
