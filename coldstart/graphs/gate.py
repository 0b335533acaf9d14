"""Proof before publishing: in a third process and layout, eager, captured and restored outputs are one.

For every graph and seed: capture(x) == capture(x) first (the judge must be fit to judge), then eager(x) ==
capture(x) == restored(x), bytes of outputs and of the KV cache.  The proof names the seal of the tables that
it proved, so it proves no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coldstart.graphs.api import DriverApi, FrameworkApi, Workload
from coldstart.graphs.errors import GraphError, NotProvenError
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.table_files import read_manifest

PROOF, REJECTED = "proof.json", "rejected.json"


@dataclass
class Proof:
    """`canary` is (key, seed, sha256 of the outputs) of the smallest graph, `hashes` the same of all at that seed.

    `adopt` says that unnamed memory was adopted in the proof: a restore does what its proof did; `eager`
    that outputs without any graph were compared as well. `unsettled` are those of `failed` of which one more
    recorded layout would decide a word that has two readings.
    """

    seal: str
    seeds: list[int]
    proven: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)
    canary: tuple[str, int, str] | None = None
    adopt: bool = False
    eager: bool = True
    hashes: dict[str, str] = field(default_factory=dict)


def digest(data: bytes) -> str:
    """What the canary compares."""
    return hashlib.sha256(data).hexdigest()


def prove(
    restorer: Restorer,
    driver: DriverApi,
    framework: FrameworkApi,
    workload: Workload,
    seeds: Sequence[int] = (1, 2),
) -> Proof:
    """Restore every graph of the bundle first, then capture each, then compare. Nothing is written."""
    seal = read_manifest(restorer.directory)["seal"]
    proof = Proof(seal=seal, seeds=list(seeds), adopt=restorer.adopt, eager=workload.has_eager)
    if not restorer.link():
        raise NotProvenError(f"the bundle cannot be linked: {restorer.fallbacks['*']}")
    sizes = restorer.sizes()
    keys = sorted(sizes, key=lambda key: sizes[key])
    restored = {key: restorer.graph_or_none(key) for key in keys}
    for key in keys:
        reason = _difference(key, restored[key], driver, framework, workload, seeds, restorer)
        if reason is None:
            proof.proven.append(key)
        else:
            proof.failed[key] = reason
            proof.unsettled += [key] if restorer.has_two_readings(key) else []
    for key in proof.proven:
        graph = restored[key]
        if graph is not None:
            proof.hashes[key] = _hash(key, graph, driver, workload, seeds[0])
    if proof.proven:
        proof.canary = (proof.proven[0], seeds[0], proof.hashes[proof.proven[0]])
    return proof


def _difference(
    key: str, restored: Replayable | None, driver: DriverApi, framework: FrameworkApi, workload: Workload,
    seeds: Sequence[int], restorer: Restorer,
) -> str | None:  # fmt: skip
    """Why this graph is not proven, or None."""
    if restored is None:
        return f"not restored: {restorer.fallbacks.get(key)}"
    captured = Replayable(driver, framework, framework.capture(key).executable, restored=False)
    for seed in seeds:
        try:
            want = observe(driver, workload, key, seed, captured.replay)
            if observe(driver, workload, key, seed, captured.replay) != want:
                return f"seed {seed}: the captured graph does not agree with itself"
            if workload.has_eager and _eager(driver, workload, key, seed) != want:
                return f"seed {seed}: captured and eager outputs differ"
            if observe(driver, workload, key, seed, restored.replay, restored=True) != want:
                return f"seed {seed}: restored outputs differ from captured ones"
        except GraphError as error:
            return f"seed {seed}: {error}"
    return None


def _eager(driver: DriverApi, workload: Workload, key: str, seed: int) -> bytes:
    return observe(driver, workload, key, seed, lambda: workload.eager(key))


def observe(
    driver: DriverApi, workload: Workload, key: str, seed: int, run: Callable[[], None], *, restored: bool = False
) -> bytes:  # fmt: skip
    """Outputs after one run on the seeded input. Raises GraphError."""
    workload.prepare(key, seed)
    run()
    driver.synchronize()
    return workload.observe(key, restored=restored)


def _hash(key: str, graph: Replayable, driver: DriverApi, workload: Workload, seed: int) -> str:
    return digest(observe(driver, workload, key, seed, graph.replay, restored=True))


def publish(proof: Proof, directory: Path) -> None:
    """Write the proof beside the tables. Raises NotProvenError unless every graph of the bundle passed."""
    manifest = read_manifest(directory)
    if proof.failed or sorted(proof.proven) != sorted(manifest["keys"]) or proof.seal != manifest["seal"]:
        raise NotProvenError(f"not published: {proof.failed or 'the proof is of other tables'}")
    (directory / PROOF).write_text(json.dumps(asdict(proof), sort_keys=True))


def reject(proof: Proof, directory: Path) -> None:
    """Leave the reasons beside the tables, for whoever drops the graphs that failed or records once more."""
    said = {"failed": proof.failed, "unsettled": proof.unsettled}
    (directory / REJECTED).write_text(json.dumps(said, sort_keys=True))


def read_rejected(directory: Path) -> tuple[dict[str, str], list[str]]:
    """Graph to reason, and those of them that one more layout may save."""
    said = json.loads((directory / REJECTED).read_text())
    return {str(k): str(v) for k, v in said["failed"].items()}, [str(key) for key in said["unsettled"]]


def read_proof(directory: Path) -> Proof:
    """The proof of exactly these tables. Raises NotProvenError."""
    try:
        data = json.loads((directory / PROOF).read_text())
        proof = Proof(**{**data, "canary": tuple(data["canary"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NotProvenError(f"no proof can be read: {error}") from error
    manifest = read_manifest(directory)
    if proof.seal != manifest["seal"] or sorted(proof.proven) != sorted(manifest["keys"]):
        raise NotProvenError("the proof is of other tables")
    return proof


def canary(proof: Proof, restorer: Restorer, driver: DriverApi, workload: Workload) -> bool:
    """Replay the smallest graph on its stored input; False means: drop the bundle and capture."""
    return proof.canary is not None and not wrong(proof, restorer, driver, workload, [proof.canary[0]])


def wrong(
    proof: Proof, restorer: Restorer, driver: DriverApi, workload: Workload, keys: Sequence[str]
) -> dict[str, str]:
    """Which of these graphs do not give the proof's outputs, with the reasons."""
    reasons = {}
    for key in keys:
        graph = restorer.graph_or_none(key)
        if graph is None:
            reasons[key] = restorer.fallbacks[key]
            continue
        try:
            if _hash(key, graph, driver, workload, proof.seeds[0]) != proof.hashes.get(key):
                reasons[key] = "its outputs are not those of the proof"
        except GraphError as error:
            reasons[key] = str(error)
    return reasons
