"""Proof of a bundle before it is published, and its check at every start.

The proof runs in a third process. All restored graphs run first, because a restore needs no forward pass, and only then is
anything captured. For every graph and seed, two captured replays must be equal, because a graph that is not deterministic
cannot be proven. Then capture(x) == restored(x) must hold for the bytes of the outputs and the KV cache. The proof contains
the seal of the tables, so it is valid for these tables only.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import BundleError
from coldstart.graphs.api import Captured, NodeKind
from coldstart.graphs.errors import GraphError, NotProvenError, format_reasons
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import load, read_manifest, require_file, sha256
from coldstart.system import start_progress

if TYPE_CHECKING:
    from coldstart.graphs.inputs import StoredInputs

PROOF = "proof.json"


@dataclass
class Proof:
    """Result of the proof.

    `hashes` has the SHA-256 of the outputs of each proven graph at the first seed; the first of `proven` is the smallest.
    """

    seal: str
    seeds: list[int]
    proven: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


def prove(restorer: Restorer, workload: StoredInputs, seeds: Sequence[int] = (1, 2)) -> Proof:
    """Run every restored graph, then capture each and compare; nothing is written.

    Raises:
        NotProvenError: The bundle cannot be linked.
    """
    proof = Proof(read_manifest(restorer.directory).seal, list(seeds))
    if not restorer.link():
        raise NotProvenError(f"cannot link the bundle: {restorer.fallbacks['*']}")
    sizes, trial = restorer.sizes(), _Trial(restorer, workload, seeds)
    keys = sorted(sizes, key=lambda key: sizes[key])
    restored = {key: restorer.restore(key) for key in keys}
    for key, graph in restored.items():
        if graph is None:
            proof.failed[key] = f"not restored: {restorer.fallbacks.get(key)}"
        else:
            trial.attempt(proof, key, functools.partial(trial.observe, "restored", key, graph))
    for key in keys:
        trial.attempt(proof, key, functools.partial(trial.capture_and_compare, key))
    proof.proven = [key for key in keys if key not in proof.failed]
    proof.hashes = {key: trial.digests["restored", key][0] for key in proof.proven}
    return proof


@dataclass
class _Trial:
    """Digests of the outputs by form and graph, one for each seed.

    `held` keeps every capture: PyTorch frees the memory of a graph with the graph, and refuses to capture into a
    pool whose graphs are all gone.
    """

    restorer: Restorer
    workload: StoredInputs
    seeds: Sequence[int]
    digests: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    held: list[Captured] = field(default_factory=list)

    def attempt(self, proof: Proof, key: str, work: Callable[[], None]) -> None:
        """Do the work for a graph that has not failed, and record why it fails."""
        if key not in proof.failed:
            try:
                work()
            except GraphError as error:
                proof.failed[key] = str(error)

    def observe(self, form: str, key: str, graph: Replayable) -> None:
        """Record the digests of one form."""
        found = self.digests[form, key] = list[str]()
        for seed in self.seeds:
            try:
                found.append(hash_outputs(self.workload, key, seed, graph))
            except GraphError as error:
                raise NotProvenError(f"the {form} graph with seed {seed}: {error}") from error

    def capture_and_compare(self, key: str) -> None:
        """Capture a graph, replay it twice, and compare the forms. Raises NotProvenError where they differ."""
        captured = self.restorer.framework.capture(key)
        self.held.append(captured)
        graph = Replayable(self.restorer.driver, self.restorer.framework, captured.executable)
        for form in ("captured", "again"):
            self.observe(form, key, graph)
        captures, again, restored = (self.digests[form, key] for form in ("captured", "again", "restored"))
        for number, seed in enumerate(self.seeds):
            if again[number] != captures[number]:
                raise NotProvenError(f"seed {seed}: two replays of the captured graph differ")
            if restored[number] != captures[number]:
                raise NotProvenError(f"seed {seed}: restored outputs differ from captured ones")


def hash_outputs(workload: StoredInputs, key: str, seed: int, graph: Replayable) -> str:
    """Return the SHA-256 of the outputs of one run on the seeded input. Raises GraphError."""
    workload.prepare(key, seed)
    graph.replay()
    graph.driver.synchronize()
    return sha256(workload.observe(key))


def write(proof: Proof, directory: Path) -> None:
    """Write the proof to the bundle's directory, where it is valid only if every graph passed."""
    (directory / PROOF).write_text(json.dumps(asdict(proof), sort_keys=True))


def decode(directory: Path) -> Proof:
    """Return the written proof, valid or not. Raises NotProvenError if there is none."""
    try:
        return msgspec.json.decode(require_file(directory / PROOF).read_bytes(), type=Proof)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise NotProvenError(f"cannot read the proof: {error}") from error


def read_proof(directory: Path) -> Proof:
    """Return the proof of exactly these tables, of which every graph passed. Raises NotProvenError."""
    proof, manifest = decode(directory), read_manifest(directory)
    if proof.failed or proof.seal != manifest.seal or sorted(proof.proven) != sorted(manifest.keys):
        reason = format_reasons(proof.failed) or "it is for other graphs than those of this bundle"
        raise NotProvenError(f"the proof is not valid: {reason}")
    return proof


# --- at a start --------------------------------------------------------------------------------------


def restore_proven(
    restorer: Restorer, proof: Proof, workload: StoredInputs, *, every: bool = False
) -> dict[str, Replayable]:
    """Restore all graphs and replay the smallest one, or with `every` each, on its stored input; return the graphs by key.

    If any output has another hash than in the proof, all of the bundle is dropped, and the result is empty.
    """
    if not restorer.link():
        return {}
    sizes, graphs = restorer.sizes(), dict[str, Replayable]()
    counter = start_progress.Counter("restore graphs", len(sizes), "graphs")
    for number, key in enumerate(sorted(sizes, key=lambda key: sizes[key]), 1):
        if (graph := restorer.restore(key)) is not None:
            graphs[key] = graph
        counter.show(number)
    wrong = dict[str, str]()
    for key in proof.proven if every else proof.proven[:1]:
        if key not in graphs:
            wrong[key] = restorer.fallbacks[key]
            continue
        try:
            with workload.preserve(key):  # inputs in use
                found = hash_outputs(workload, key, proof.seeds[0], graphs[key])
            if found != proof.hashes.get(key):
                wrong[key] = "its outputs differ from the proof"
        except GraphError as error:
            wrong[key] = str(error)
    if not wrong:
        return graphs
    restorer.drop(f"the canary failed: {'; '.join(f'{key}: {why}' for key, why in wrong.items())}")
    return {}


# --- without a device --------------------------------------------------------------------------------


@contextmanager
def extract(bundle: Bundle) -> Iterator[Path]:
    """Extract the section into a temporary directory, which is deleted on exit. Raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="coldstart-inspect-") as place:
        # The section is read and never loaded, so its source need not be trusted.
        bundle.extract("graphs", Path(place) / "graphs", trust=anyone)
        yield Path(place) / "graphs"


def summarize(bundle: Bundle) -> dict[str, Any]:
    """Return counts of nodes, edges, relocations and proven graphs, the refused graphs and the bytes of a section as JSON data.

    The result has an "error" if the section cannot be read: it is untrusted and can have any numbers.
    """
    try:
        with extract(bundle) as directory:
            tables = load(directory)
            graphs = list(tables.graphs.values())
            kinds = Counter(NodeKind(kind).name.lower() for g in graphs for kind in g.nodes["kind"].tolist())
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
                "proof": {"graphs": len(read_proof(directory).proven)}
                if (directory / PROOF).exists()
                else None,
            }
    except (BundleError, GraphError, IndexError, ValueError) as error:
        return {"error": str(error)}
