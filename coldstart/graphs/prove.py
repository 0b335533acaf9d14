"""Proof of a bundle before it is published, and its check at every start.

The proof runs in a third process. All restored graphs run first, because a restore needs no forward pass, and only then is
anything captured. For every graph and seed, two captured replays must be equal, because a graph that is not deterministic
cannot be proven. Then capture(x) == restored(x) must hold for the bytes of the outputs and the KV cache. The proof contains
the seal of the tables, so it is valid for these tables only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coldstart.graphs.api import Captured
from coldstart.graphs.errors import GraphError, NotProvenError, format_reasons
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import read_manifest, require_file, sha256
from coldstart.system.start_progress import Counter

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.inputs import StoredInputs
    from coldstart.graphs.torch_framework import TorchFramework

PROOF, REJECTED = "proof.json", "rejected.json"


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


def prove(
    restorer: Restorer, driver: CudaDriver, framework: TorchFramework, workload: StoredInputs, seeds: Sequence[int] = (1, 2)
) -> Proof:  # fmt: skip
    """Run every restored graph, then capture each and compare; nothing is written.

    Raises:
        NotProvenError: The bundle cannot be linked.
    """
    proof = Proof(read_manifest(restorer.directory).seal, list(seeds))
    if not restorer.link():
        raise NotProvenError(f"cannot link the bundle: {restorer.fallbacks['*']}")
    sizes, trial = restorer.sizes(), _Trial(driver, framework, workload, seeds)
    keys = sorted(sizes, key=lambda key: sizes[key])
    restored = {key: restorer.restore(key) for key in keys}
    for key, graph in restored.items():
        if graph is None:
            trial.reasons[key] = f"not restored: {restorer.fallbacks.get(key)}"
        else:
            trial.observe("restored", key, graph.replay)
    for key in keys:
        trial.capture_and_compare(key)
    proof.failed = {key: trial.reasons[key] for key in keys if key in trial.reasons}
    proof.proven = [key for key in keys if key not in proof.failed]
    proof.hashes = {key: trial.digests["restored", key][0] for key in proof.proven}
    return proof


@dataclass
class _Trial:
    """Digests of the outputs by form and graph, one for each seed, and the reason for each failed graph.

    `held` keeps every capture: PyTorch frees the memory of a graph with the graph, and refuses to capture into a
    pool whose graphs are all gone.
    """

    driver: CudaDriver
    framework: TorchFramework
    workload: StoredInputs
    seeds: Sequence[int]
    digests: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    held: list[Captured] = field(default_factory=list)

    def observe(self, form: str, key: str, run: Callable[[], None]) -> None:
        """Record the digests of one form, or the reason why it fails."""
        found = self.digests[form, key] = list[str]()
        for seed in self.seeds if key not in self.reasons else []:
            try:
                found.append(hash_outputs(self.driver, self.workload, key, seed, run))
            except GraphError as error:
                self.reasons[key] = f"the {form} graph with seed {seed}: {error}"
                return

    def capture_and_compare(self, key: str) -> None:
        """Capture a graph that has not failed, replay it twice, and record where the forms differ."""
        if key in self.reasons:
            return
        try:
            captured = self.framework.capture(key)
        except GraphError as error:
            self.reasons[key] = str(error)
            return
        self.held.append(captured)
        graph = Replayable(self.driver, self.framework, captured.executable)
        for form in ("captured", "again"):
            self.observe(form, key, graph.replay)
        if key not in self.reasons and (reason := self._find_difference(key)) is not None:
            self.reasons[key] = reason

    def _find_difference(self, key: str) -> str | None:
        """Return the first difference between the forms of a graph, of which none has failed."""
        reasons = {
            "again": "two replays of the captured graph differ",
            "restored": "restored outputs differ from captured ones",
        }
        for number, seed in enumerate(self.seeds):
            for form, reason in reasons.items():
                if self.digests[form, key][number] != self.digests["captured", key][number]:
                    return f"seed {seed}: {reason}"
        return None


def hash_outputs(
    driver: CudaDriver, workload: StoredInputs, key: str, seed: int, run: Callable[[], None]
) -> str:
    """Return the SHA-256 of the outputs of one run on the seeded input. Raises GraphError."""
    workload.prepare(key, seed)
    run()
    driver.synchronize()
    return sha256(workload.observe(key))


def publish(proof: Proof, directory: Path) -> None:
    """Write the proof to the bundle's directory. Raises NotProvenError unless every graph of the bundle passed."""
    manifest = read_manifest(directory)
    if proof.failed or sorted(proof.proven) != sorted(manifest.keys) or proof.seal != manifest.seal:
        reason = format_reasons(proof.failed) or "it proves other graphs than those of this bundle"
        raise NotProvenError(f"cannot publish the proof: {reason}")
    (directory / PROOF).write_text(json.dumps(asdict(proof), sort_keys=True))


def reject(proof: Proof, directory: Path) -> None:
    """Write the reasons to the bundle's directory; the next step drops the failed graphs."""
    (directory / REJECTED).write_text(json.dumps(proof.failed, sort_keys=True))


def read_proof(directory: Path) -> Proof:
    """Return the proof of exactly these tables. Raises NotProvenError."""
    try:
        proof = msgspec.json.decode(require_file(directory / PROOF).read_bytes(), type=Proof)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise NotProvenError(f"cannot read the proof: {error}") from error
    manifest = read_manifest(directory)
    if proof.seal != manifest.seal or sorted(proof.proven) != sorted(manifest.keys):
        raise NotProvenError("the proof is for other graphs than those of this bundle")
    return proof


# --- at a start --------------------------------------------------------------------------------------


def restore_proven(
    restorer: Restorer, proof: Proof, workload: StoredInputs | None, *, every: bool = False
) -> dict[str, Replayable]:
    """Restore all graphs and replay the smallest one, or with `every` each, on its stored input; return the graphs by key.

    If any output has another hash than in the proof, all of the bundle is dropped, and the result is empty. `workload` None
    omits the replay.
    """
    if not restorer.link():
        return {}
    sizes, graphs = restorer.sizes(), dict[str, Replayable]()
    counter = Counter("restore graphs", len(sizes), "graphs")
    for number, key in enumerate(sorted(sizes, key=lambda key: sizes[key]), 1):
        if (graph := restorer.restore(key)) is not None:
            graphs[key] = graph
        counter.show(number)
    wrong = dict[str, str]()
    for key in proof.proven if every else proof.proven[:1]:
        if workload is None:
            break
        try:
            if (reason := _find_mismatch(restorer, proof, workload, graphs.get(key), key)) is not None:
                wrong[key] = reason
        except GraphError as error:
            wrong[key] = str(error)
    if not wrong:
        return graphs
    restorer.drop(f"the canary failed: {'; '.join(f'{key}: {why}' for key, why in wrong.items())}")
    return {}


def _find_mismatch(
    restorer: Restorer, proof: Proof, workload: StoredInputs, graph: Replayable | None, key: str
) -> str | None:
    if graph is None:
        return restorer.fallbacks[key]
    with workload.preserve(key):  # inputs in use
        found = hash_outputs(restorer.driver, workload, key, proof.seeds[0], graph.replay)
    return None if found == proof.hashes.get(key) else "its outputs differ from the proof"
