"""Verify the restored graphs of a bundle before it is published.

Verification runs in a third process. All restored graphs are replayed before any graph is captured, because a restore
must work without a forward pass. For each graph and seed, two replays of the captured graph must give equal outputs,
because only deterministic graphs can be verified. Then the outputs and KV cache bytes of the restored graph must equal
those of the captured graph. The proof contains the seal of the tables, so it is valid only for them. A server start
additionally checks the bundle's canary tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import BundleError
from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import GraphError, NotProvenError, format_reasons
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import load, read_file, read_manifest, sha256

if TYPE_CHECKING:
    from coldstart.graphs.inputs import Workload

PROOF = "proof.json"


@dataclass
class Proof:
    """Result of a verification. `proven` are graph keys in order of size, and `failed` maps graph keys to reasons."""

    seal: str
    seeds: list[int]
    proven: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def prove(restorer: Restorer, workload: Workload, seeds: Sequence[int] = (1, 2)) -> Proof:
    """Replay each restored graph, then capture each graph and compare the outputs. Return the proof without writing it.

    Raises:
        NotProvenError: The graphs cannot be relocated in this process.
    """
    proof = Proof(read_manifest(restorer.directory).seal, list(seeds))
    restored, found = restorer.restore_all(), dict[str, list[str]]()
    if reason := restorer.fallbacks.pop("*", None):
        raise NotProvenError(f"cannot relocate the CUDA graphs of this bundle: {reason}")
    proof.failed |= {key: f"cannot restore the graph: {why}" for key, why in restorer.fallbacks.items()}
    for key, graph in restored.items():
        try:
            found[key] = _hash_outputs("restored", workload, key, seeds, graph)
        except GraphError as error:
            proof.failed[key] = str(error)
    # Keep the graphs: PyTorch frees their memory along with them, and cannot capture into a pool that has no graph.
    held = list[Any]()
    for key, digests in found.items():
        try:
            held.append(captured := restorer.framework.capture(key))
            workload.prepare(key, seeds[0])
            if restorer.framework.consumes_random(captured):
                raise NotProvenError("cannot verify the graph: it consumes random numbers")
            graph = Replayable(restorer.driver, restorer.framework, captured.executable)
            first, again = (_hash_outputs("captured", workload, key, seeds, graph) for _ in range(2))
            if first != again:
                raise NotProvenError("cannot verify the graph: two replays of the captured graph differ")
            if first != digests:
                raise NotProvenError("the restored and the captured graph have different outputs")
            proof.proven.append(key)
        except GraphError as error:
            proof.failed[key] = str(error)
    return proof


def _hash_outputs(
    form: str, workload: Workload, key: str, seeds: Sequence[int], graph: Replayable
) -> list[str]:
    """Return, for each seed, the SHA-256 of the outputs of one replay. Raises NotProvenError if the replay fails."""
    found = list[str]()
    for seed in seeds:
        try:
            workload.prepare(key, seed)
            graph.replay()
            graph.driver.synchronize()
            found.append(sha256(workload.observe(key)))
        except GraphError as error:
            raise NotProvenError(f"cannot replay the {form} graph with seed {seed}: {error}") from error
    return found


def write(proof: Proof, directory: Path) -> None:
    """Write the proof to the bundle's directory. `read_proof` accepts it only if every graph passed."""
    (directory / PROOF).write_text(json.dumps(asdict(proof), sort_keys=True))


def parse_proof(directory: Path) -> Proof:
    """Parse the stored proof without validating it. Raises NotProvenError if it cannot be read."""
    try:
        return msgspec.json.decode(read_file(directory / PROOF), type=Proof)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise NotProvenError(f"cannot read the verification result of the graphs: {error}") from error


def read_proof(directory: Path) -> Proof:
    """Return the stored proof. Raises NotProvenError if a graph failed or the proof does not match the tables."""
    proof, manifest = parse_proof(directory), read_manifest(directory)
    if proof.failed or proof.seal != manifest.seal or sorted(proof.proven) != sorted(manifest.keys):
        reason = format_reasons(proof.failed) or "it belongs to the graphs of another bundle"
        raise NotProvenError(f"invalid verification result of the graphs: {reason}")
    return proof


# --- without a device --------------------------------------------------------------------------------


@contextmanager
def extract_graphs(bundle: Bundle) -> Iterator[Path]:
    """Yield a temporary directory with the extracted `graphs` section, which is deleted on exit. Raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="coldstart-inspect-") as place:
        # The section is only read, never executed, so its source need not be trusted.
        bundle.extract_section("graphs", Path(place) / "graphs", trust=accept_any)
        yield Path(place) / "graphs"


def summarize(bundle: Bundle) -> dict[str, Any]:
    """Return a JSON-compatible summary of the `graphs` section: counts by node type and region, size, refusals and proof.

    The section is untrusted. If it cannot be read, the result contains only an "error".
    """
    try:
        with extract_graphs(bundle) as directory:
            tables = load(directory)
            graphs = list(tables.graphs.values())
            kinds = Counter(NodeKind(kind).name.lower() for g in graphs for kind in g.nodes["kind"].tolist())
            proof = {"graphs": len(read_proof(directory).proven)} if (directory / PROOF).exists() else None
            symbols = [region.symbol.partition(":")[0] for region in tables.regions]
            regions = Counter(symbols[i] for g in graphs for i in g.relocations["region"].tolist())
            return {
                "graphs": len(graphs),
                "nodes": kinds.total(),
                "nodes_by_kind": dict(sorted(kinds.items())),
                "edges": sum(len(g.edges) for g in graphs),
                "relocations": regions.total(),
                "relocations_by_region": dict(sorted(regions.items())),
                "refused": tables.refused,
                "bytes_on_disk": sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
                "proof": proof,
            }
    except (BundleError, GraphError, IndexError, ValueError) as error:
        return {"error": str(error)}
