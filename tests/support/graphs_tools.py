"""Offline and online phases on simulated processes, and helpers to inspect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstart.graphs import capture, combine, contents, gate, table_files
from coldstart.graphs.api import Captured
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import Tables
from tests.support.graphs.model import Shape, SimModel

SMALL = Shape("small", 2, sizes=(1, 8, 64, 256))


@dataclass
class Half:
    """One process that captured everything."""

    model: SimModel
    captured: dict[str, Captured]
    snapshot: Snapshot


def offline(seed: int, shape: Shape = SMALL, model: SimModel | None = None) -> Half:
    """Capture every size, largest first."""
    model = model or SimModel(shape, seed)
    captured = {key: model.capture(key) for key in reversed(model.sizes())}
    return Half(model, captured, capture.take(model.driver, model, captured))


def bundle(directory: Path, shape: Shape = SMALL, seeds: Sequence[int] = (1, 2, 5, 6)) -> Tables:
    """Combine two processes, and more that resolve ambiguous words, to one bundle on disk."""
    a, b, *more = (offline(seed, shape) for seed in seeds)
    combined = combine.combine(a.snapshot, b.snapshot, [half.snapshot for half in more])
    tables = contents.minimise(b.model.driver, b.model, b.captured, combined, b.snapshot.contents)
    table_files.save(tables, directory, b.snapshot.binaries)
    return tables


def proven(directory: Path, shape: Shape = SMALL) -> Tables:
    """Create a bundle that passed the gate in a third process."""
    tables = bundle(directory, shape)
    model = SimModel(shape, 3)
    proof = gate.prove(Restorer(directory, model.driver, model), model.driver, model, model)
    gate.publish(proof, directory)
    return tables


def seal(bundle: Path, target: Path, tables: Tables) -> Path:
    """Write `tables` with the binaries of `bundle` to `target` and seal them."""
    digests = table_files.read_manifest(bundle)["binaries"]
    table_files.save(tables, target, {digest: table_files.load_binary(bundle, digest) for digest in digests})
    return target


def outputs(model: SimModel, executable: int, key: str, seed: int = 9) -> bytes:
    """Return the outputs of one replay."""
    model.prepare(key, seed)
    model.driver.launch(executable, 0)
    return model.observe(key)
