"""Run one job on the fake driver and print the result as a JSON object on the last line."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from support.fake_cuda.model import FakeModel

from coldstart.graphs.errors import GraphError
from coldstart.graphs.link import combine
from coldstart.graphs.prove import prove as run_proof
from coldstart.graphs.prove import write
from coldstart.graphs.record import load_snapshot, take
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import save


def snapshot(seed: int, out: Path) -> dict[str, object]:
    model = FakeModel(seed)
    captured = {key: model.capture(key) for key in model.sizes()}
    take(model.driver, model, captured).save(out)
    return {"graphs": len(captured)}


def bundle(seed: int, other: Path, out: Path) -> dict[str, object]:
    model = FakeModel(seed)
    captured = {key: model.capture(key) for key in model.sizes()}
    mine = take(model.driver, model, captured)
    tables = combine(load_snapshot(other), mine)
    save(tables, out, mine.binaries)
    return {"report": tables.report, "refused": tables.refused, "contents": int(tables.contents.nbytes)}


def prove(seed: int, where: Path) -> dict[str, object]:
    model = FakeModel(seed)
    restorer = Restorer(where, model.driver, model)
    proof = run_proof(restorer, model)
    write(proof, where)
    graph = _kept(restorer, "decode:4").keep[1]
    edges = [(e.from_port, e.type) for e in model.driver.edges(graph) if e.type]
    attributes = [
        a
        for n in model.driver.nodes(graph)
        if model.driver.kind(n) == 0
        for a in model.driver.kernel_node(n).attributes
    ]
    return {"proven": proof.proven, "failed": proof.failed, "edge_data": edges, "attributes": attributes}


def faults(seed: int, where: Path) -> dict[str, object]:
    """Fail each driver call of a restore in turn, once alone and once with all after it."""
    model = FakeModel(seed)
    fake = ctypes.CDLL("libcuda.so.1")
    want = {key: _run(model, model.capture(key).executable, key) for key in model.sizes()}
    before = fake.fake_calls()
    _restore(model, where)
    count = fake.fake_calls() - before
    counts = {"calls": count, "restored": 0, "refused": 0, "wrong": 0, "crashed": 0}
    for more in (0, 1):
        for number in range(1, count + 1):
            fake.fake_fail_at(number, more)
            try:
                graphs = _restore(model, where)
            except Exception as error:  # noqa: BLE001 - any other exception is what the test looks for
                counts["crashed"] += 1
                print(number, more, repr(error), file=sys.stderr)
                continue
            finally:
                fake.fake_fail_at(-1, 0)
            for key, graph in graphs.items():
                counts["restored" if graph else "refused"] += 1
                counts["wrong"] += graph is not None and _run(model, graph.executable, key) != want[key]
    return counts


def readings(seed: int) -> dict[str, object]:
    """Return the refusals of launch attributes by the backend, and its instantiation flags."""
    model = FakeModel(seed)
    fake, d = ctypes.CDLL("libcuda.so.1"), model.driver.d
    captured = {key: model.capture(key) for key in model.sizes()}
    out: dict[str, object] = {"flags": fake.fake_last_flags()}
    for name, error in (("invalid", 1), ("unsupported", 801), ("unknown", 999)):
        fake.fake_attribute_error(13, error)
        fake.fake_attribute_error(8, error)
        out[name] = take(model.driver, model, captured).tables.refused
    fake.fake_attribute_error(-1, 0)
    for name, window, missed in (("window", 4096, 0), ("properties", 0, 2)):
        held = model.capture("decode:4")
        (kernel, *_) = [n for n in model.driver.nodes(held.graph) if model.driver.kind(n) == 0]
        value = d.CUkernelNodeAttrValue()
        policy = value.accessPolicyWindow
        policy.num_bytes, policy.missProp = window, d.CUaccessProperty(missed)
        value.accessPolicyWindow = policy
        d.cuGraphKernelNodeSetAttribute(d.CUgraphNode(kernel), d.CUlaunchAttributeID(1), value)
        out[name] = take(model.driver, model, {**captured, "decode:4": held}).tables.refused
    return out


def unlisted(seed: int) -> dict[str, object]:
    """Record with a driver that lists no module's functions: the recorded graphs and the refusals."""
    fake, model = ctypes.CDLL("libcuda.so.1"), FakeModel(seed)
    fake.fake_enumeration_error(801)
    captured = {key: model.capture(key) for key in model.sizes()}
    tables = take(model.driver, model, captured).tables
    return {"keys": list(tables.graphs), "refused": tables.refused}


def _kept(restorer: Restorer, key: str) -> Replayable:
    graph = restorer.restore(key)
    assert graph is not None, restorer.fallbacks
    return graph


def _restore(model: FakeModel, where: Path) -> dict[str, Replayable | None]:
    restorer = Restorer(where, model.driver, model)
    restorer.link()
    return {key: restorer.restore(key) for key in model.sizes()}


def _run(model: FakeModel, executable: int, key: str) -> bytes:
    model.prepare(key, 3)
    model.driver.launch(executable, 0)
    return model.observe(key)


def main() -> None:
    name, seed, *paths = sys.argv[1:]
    jobs = (snapshot, bundle, prove, faults, readings, unlisted)
    job = {job.__name__: job for job in jobs}[name]
    try:
        print(json.dumps(job(int(seed), *map(Path, paths))))
    except GraphError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(3)


if __name__ == "__main__":
    main()
