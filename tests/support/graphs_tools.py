"""Offline and online phases on simulated processes, and helpers to inspect them."""

from pathlib import Path

from coldstart.graphs import tables as stored
from coldstart.graphs.link import combine
from coldstart.graphs.prove import prove, write
from coldstart.graphs.record import Snapshot, create_snapshot
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import Tables
from tests.support.graphs.model import Shape, SimModel

SMALL = Shape("small", 2, sizes=(1, 8, 64, 256))


def offline(seed: int, model: SimModel | None = None) -> Snapshot:
    """Capture every size in one process, largest first."""
    model = model or SimModel(SMALL, seed)
    return create_snapshot(model.driver, model, {key: model.capture(key) for key in reversed(model.sizes)})


def bundle(directory: Path) -> None:
    """Combine two processes to one bundle on disk."""
    a, b = offline(1), offline(2)
    stored.save(combine(a, b), directory, b.binaries)


def proven(directory: Path) -> None:
    """Create a bundle that passed the proof in a third process."""
    bundle(directory)
    model = SimModel(SMALL, 3)
    write(prove(Restorer(directory, model.driver, model), model), directory)


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
    digests, place = stored.read_manifest(bundle).binaries, bundle / "kernels"
    stored.save(tables, target, {digest: stored.read_by_digest(place, digest) for digest in digests})
    return target


def outputs(model: SimModel, executable: int, key: str, seed: int = 9) -> bytes:
    """Return the outputs of one replay."""
    model.prepare(key, seed)
    model.driver.launch(executable, 0)
    return model.observe(key)
