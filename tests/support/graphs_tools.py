"""Offline and online phases on simulated processes, and helpers to inspect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstart.graphs import tables as stored
from coldstart.graphs.api import Captured
from coldstart.graphs.link import combine
from coldstart.graphs.prove import prove, write
from coldstart.graphs.record import Snapshot, take
from coldstart.graphs.restore import Replayable, Restorer
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
    return Half(model, captured, take(model.driver, model, captured))


def bundle(directory: Path, shape: Shape = SMALL, seeds: Sequence[int] = (1, 2)) -> Tables:
    """Combine two processes to one bundle on disk."""
    a, b = (offline(seed, shape).snapshot for seed in seeds)
    tables = combine(a, b)
    stored.save(tables, directory, b.binaries)
    return tables


def proven(directory: Path, shape: Shape = SMALL) -> Tables:
    """Create a bundle that passed the proof in a third process."""
    tables = bundle(directory, shape)
    model = SimModel(shape, 3)
    write(prove(Restorer(directory, model.driver, model), model), directory)
    return tables


def linked(directory: Path, model: SimModel) -> Restorer:
    """Return a linked restorer."""
    restorer = Restorer(directory, model.driver, model)
    assert restorer.link(), restorer.fallbacks
    return restorer


def restored(restorer: Restorer, key: str) -> Replayable:
    """Return a graph that can be restored."""
    graph = restorer.restore(key)
    assert graph is not None, restorer.fallbacks
    return graph


def seal(bundle: Path, target: Path, tables: Tables) -> Path:
    """Write `tables` with the binaries of `bundle` to `target` and seal them."""
    digests = stored.read_manifest(bundle).binaries
    stored.save(
        tables, target, {digest: stored.read_by_digest(bundle / "kernels", digest) for digest in digests}
    )
    return target


def outputs(model: SimModel, executable: int, key: str, seed: int = 9) -> bytes:
    """Return the outputs of one replay."""
    model.prepare(key, seed)
    model.driver.launch(executable, 0)
    return model.observe(key)
