"""Whole processes whose replay is wrong when a naive method is used; each case has its companion."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs_tools import SMALL, offline, outputs, proven

from coldstart.graphs import capture, contents, gate, materialize, store
from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import BaseCollision, DriverFailure, GraphError, MissingKernel, NotProven
from coldstart.graphs.kernels import Ladder
from coldstart.graphs.restore import Restorer
from coldstart.graphs.sim.driver import Library, Node, SimDriver
from coldstart.graphs.sim.images import cubin
from coldstart.graphs.sim.kernels import ROUTINES
from coldstart.graphs.sim.model import Shape, SimModel, libraries
from coldstart.graphs.table import TENSOR_MAP, Kernel, Tables


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adversarial") / "bundle"
    proven(directory)
    return directory


def _altered(made: Path, tmp_path: Path, change: object) -> Path:
    """The bundle with tables changed and sealed again, as a naive implementation would have written it."""
    tables = store.load(made)
    binaries = {d: store.load_binary(made, d) for d in {k.binary for k in tables.kernels if k.binary}}
    changed: Tables = change(tables)  # type: ignore[operator]
    store.save(changed, tmp_path / "naive", binaries)
    return tmp_path / "naive"


def _wrong(directory: Path, key: str, seed: int = 21) -> bool:
    """Whether restored and captured outputs differ, or the replay faults."""
    model = SimModel(SMALL, seed)
    restorer = Restorer(directory, model.driver, model)
    assert restorer.link()
    restored = restorer.graph(key)
    assert restored.restored, restorer.fallbacks
    try:
        got = outputs(model, restored.executable, key)
    except GraphError:
        return True
    return got != outputs(model, model.capture(key).executable, key)


@pytest.mark.parametrize("key", list(SimModel(SMALL, 0).sizes()))
def test_the_bundle_itself_is_right(made: Path, key: str) -> None:
    assert not _wrong(made, key)


def test_split_k_semaphores_are_among_the_contents(made: Path) -> None:
    tables = store.load(made)
    held = {tables.regions[b["region"]].symbol for b in tables.blocks}
    assert any(symbol.startswith("lib:") for symbol in held)
    assert tables.contents.nbytes <= 4 * contents.BLOCK_BYTES


def test_naive_without_contents_the_semaphore_is_never_ready(made: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        return replace(
            t, blocks=t.blocks[:0], contents=t.contents[:0], content_relocations=t.content_relocations[:0]
        )

    assert _wrong(_altered(made, tmp_path, drop), "decode:1")


def test_naive_verbatim_contents_hold_addresses_of_another_process(made: Path, tmp_path: Path) -> None:
    assert len(store.load(made).content_relocations) == 2
    naive = _altered(made, tmp_path, lambda t: replace(t, content_relocations=t.content_relocations[:0]))
    assert _wrong(naive, "decode:256")


def test_naive_without_edges_a_parallel_order_is_wrong(made: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        graphs = t.graphs.copy()
        graphs["edge"] = graphs["edges"] = 0
        return replace(t, graphs=graphs, edges=t.edges[:0])

    assert _wrong(_altered(made, tmp_path, drop), "decode:256")


def test_graphs_are_not_chains_and_their_edge_data_survive(made: Path) -> None:
    model = SimModel(SMALL, 22)
    restorer = Restorer(made, model.driver, model)
    restorer.link()
    for key in model.sizes():
        captured, restored = model.capture(key).graph, restorer.graph(key).keep[1]
        shapes = [_shape(model.driver, graph) for graph in (captured, restored)]
        assert shapes[0] == shapes[1]
        assert any(kind for *_, kind in shapes[0])
        assert len({s for s, *_ in shapes[0]}) < len(shapes[0])


def _shape(driver: SimDriver, graph: int) -> list[tuple[int, ...]]:
    number = {handle: i for i, handle in enumerate(driver.nodes(graph))}
    return sorted(
        (number[e.source], number[e.target], e.from_port, e.to_port, e.type) for e in driver.edges(graph)
    )


def test_naive_plain_edges_lose_the_programmatic_ones(made: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        edges = t.edges.copy()
        edges["type"] = edges["from_port"] = 0
        return replace(t, edges=edges)

    model = SimModel(SMALL, 23)
    restorer = Restorer(_altered(made, tmp_path, drop), model.driver, model)
    restorer.link()
    graph = restorer.graph("decode:1").keep[1]
    assert _shape(model.driver, graph) != _shape(model.driver, model.capture("decode:1").graph)


def test_tensor_maps_are_moved_by_the_driver(made: Path) -> None:
    assert (store.load(made).relocations["kind"] == TENSOR_MAP).any()


def test_naive_plain_words_leave_tensor_maps_where_they_were(made: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        keep = t.relocations["kind"] != TENSOR_MAP
        graph = np.repeat(np.arange(len(t.graphs)), t.graphs["relocations"])[keep]
        graphs = t.graphs.copy()
        graphs["relocations"] = np.bincount(graph, minlength=len(graphs))
        graphs["relocation"] = np.concatenate([[0], np.cumsum(graphs["relocations"])[:-1]])
        return replace(t, graphs=graphs, relocations=t.relocations[keep])

    assert _wrong(_altered(made, tmp_path, drop), "decode:64")


def test_a_relocation_shifted_by_256_bytes_does_not_pass_the_gate(made: Path, tmp_path: Path) -> None:
    def shift(t: Tables) -> Tables:
        rows = t.relocations.copy()
        static = [i for i, r in enumerate(t.regions) if r.symbol == "kv:0"]
        rows["offset"][np.flatnonzero(np.isin(rows["region"], static))] += 256
        return replace(t, relocations=rows)

    naive = _altered(made, tmp_path, shift)
    model = SimModel(SMALL, 24)
    proof = gate.prove(Restorer(naive, model.driver, model), model.driver, model, model)
    assert proof.failed
    with pytest.raises(NotProven):
        gate.publish(proof, naive)


def test_the_canary_catches_altered_tables_that_were_sealed_again(made: Path, tmp_path: Path) -> None:
    def swap(t: Tables) -> Tables:
        rows = t.relocations.copy()
        first = t.graphs[t.keys.index("decode:1")]
        mine = np.arange(first["relocation"], first["relocation"] + first["relocations"])
        params = [i for i, r in enumerate(t.regions) if r.symbol.startswith("param:layers")]
        at = mine[np.isin(rows["region"][mine], params)]
        rows["region"][at] = np.roll(rows["region"][at], 1)
        return replace(t, relocations=rows)

    naive = _altered(made, tmp_path, swap)
    shutil.copy(made / gate.PROOF, naive / gate.PROOF)
    with pytest.raises(NotProven):
        gate.read_proof(naive)
    model = SimModel(SMALL, 25)
    restorer = Restorer(naive, model.driver, model)
    restorer.link()
    assert not gate.canary(gate.read_proof(made), restorer, model.driver, model)


def test_two_layouts_that_do_not_differ_are_refused() -> None:
    halves = []
    for seed in (1, 2):
        driver = SimDriver(seed, libraries(), fixed_bases=True)
        halves.append(offline(seed, model=SimModel(SMALL, 1, driver=driver)))
    with pytest.raises(BaseCollision):
        materialize.combine(halves[0].snapshot, halves[1].snapshot)


# --- kernels ---


def _twins(driver: SimDriver) -> tuple[Kernel, Kernel]:
    return driver.kernel(driver.function("twin", "twin")), driver.kernel(driver.function("other", "twin"))


def _run(driver: SimDriver, function: int) -> float:
    x, out = driver.allocate(512), driver.allocate(512)
    driver.memory.array(x, np.float32, 1)[:] = 1
    payload = ROUTINES["scale"].fields.pack(x, out, 1)
    driver.submit(Node(NodeKind.KERNEL, payload, function))
    return float(driver.memory.array(out, np.float32, 1)[0])


def test_two_binaries_with_one_kernel_name_are_two_kernels() -> None:
    source = SimDriver(1, libraries())
    one, other = _twins(source)
    assert one.name == other.name and one != other
    model = SimModel(SMALL, 2)
    ladder = Ladder(model.driver, model, source.binary)
    assert _run(model.driver, ladder.resolve(one)) == 2
    assert _run(model.driver, ladder.resolve(other)) == 3


def test_naive_a_name_alone_picks_the_wrong_binary() -> None:
    model = SimModel(SMALL, 2)
    _, other = _twins(model.driver)
    by_name = {model.driver.kernel(f).name: f for f in reversed(model.driver.loaded_functions())}
    assert _run(model.driver, by_name[other.name]) == 2


def _unbundled(digest: str) -> bytes:
    raise MissingKernel("not bundled")


def test_hidden_kernels_come_from_modules_that_the_first_layer_loads() -> None:
    source = SimModel(SMALL, 1)
    hidden = source.driver.kernel(source.driver.function("blas", "blas_gemm_split"))
    model = SimModel(SMALL, 2)
    ladder = Ladder(model.driver, model, _unbundled)
    assert model.driver.kernel(ladder.resolve(hidden)).name == "blas_gemm_split"
    assert ladder.rungs == {"triggering": 1}


def test_naive_dlsym_cannot_see_hidden_kernels() -> None:
    model = SimModel(SMALL, 2)
    assert model.driver.exported("blas_gemm_split", "blas") is None
    assert model.driver.exported("fw_embed", "framework") is not None


def test_exported_kernels_need_no_trigger() -> None:
    model = SimModel(SMALL, 2)
    kernel = SimModel(SMALL, 1).driver
    wanted = kernel.kernel(kernel.function("framework", "fw_embed"))
    model.trigger = lambda: None  # type: ignore[method-assign]
    ladder = Ladder(model.driver, model, _unbundled)
    ladder.resolve(wanted)
    assert ladder.rungs == {"exported": 1}


def test_a_binary_with_mutable_globals_is_never_loaded_twice() -> None:
    image = cubin({"k": ("scale", ROUTINES["scale"].layout)}, globals_=("counter",))
    extra = (*libraries(), Library("stateful", image, exported=False))
    kernel = (one := SimDriver(1, extra)).kernel(one.function("stateful", "k"))
    model = SimModel(SMALL, 2, driver=SimDriver(2, extra))
    with pytest.raises(MissingKernel, match="mutable globals"):
        Ladder(model.driver, model, one.binary).resolve(kernel)
    loaded = model.driver.function("stateful", "k")
    assert Ladder(model.driver, model, one.binary).resolve(kernel) == loaded


def test_function_attributes_are_set_again() -> None:
    source = SimDriver(1, libraries())
    handle = source.function("framework", "fw_embed")
    source.set_function_attributes(handle, [(8, 100 << 10)])
    model = SimModel(SMALL, 2)
    again = Ladder(model.driver, model, source.binary).resolve(source.kernel(handle))
    assert model.driver.kernel(again).attributes == ((8, 100 << 10),)


def test_naive_without_them_a_big_shared_buffer_is_an_error() -> None:
    driver = SimDriver(1, libraries())
    driver.begin_capture()
    driver.submit(Node(NodeKind.KERNEL, b"", driver.function("framework", "fw_embed"), shared=100 << 10))
    with pytest.raises(DriverFailure):
        driver.instantiate(driver.end_capture())


# --- refusals ---


def _refusal(spoil: object) -> str:
    """What the report says of a graph to which `spoil` added a node."""
    model = SimModel(Shape("one", 1, sizes=(8,)), 5)
    real = model.forward

    def forward(size: int, layers: int | None = None) -> None:
        real(size, layers)
        if model.driver.capturing is not None:
            spoil(model)  # type: ignore[operator]

    model.forward = forward  # type: ignore[method-assign]
    half = offline(5, model=model)
    return half.snapshot.tables.refused.get("decode:8", "")


@pytest.mark.parametrize(
    "kind", [NodeKind.HOST, NodeKind.CONDITIONAL, NodeKind.ALLOC, NodeKind.FREE, NodeKind.CHILD]
)
def test_unsupported_nodes_are_refused_by_name(kind: NodeKind) -> None:
    assert kind.name.lower() in _refusal(lambda m: m.driver.submit(Node(kind)))


def test_copies_from_host_memory_are_refused() -> None:
    def spoil(m: SimModel) -> None:
        m._copy(m.driver.memory.allocate(512, host=True), m._at("static:out"), 16)

    assert "host memory" in _refusal(spoil)


def test_pinned_host_pointers_are_refused() -> None:
    def call(m: SimModel) -> None:
        function = m.driver.function("twin", "twin")
        host = m.driver.memory.allocate(512, host=True)
        m._mark()
        m.driver.submit(
            Node(NodeKind.KERNEL, ROUTINES["scale"].fields.pack(host, m._at("static:out"), 1), function)
        )

    assert "pinned host pointer" in _refusal(call)


def test_collectives_are_refused() -> None:
    image = cubin({"ncclDevKernel_AllReduce": ("scale", ROUTINES["scale"].layout)})
    driver = SimDriver(6, (*libraries(), Library("nccl", image, exported=True)))
    kernel = driver.kernel(driver.function("nccl", "ncclDevKernel_AllReduce"))
    with pytest.raises(GraphError, match="collective"):
        capture._refuse_collective(kernel)


def test_random_number_graphs_are_refused_by_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimModel, "refusal", lambda self, key: "the graph consumes random numbers")
    half = offline(7)
    assert set(half.snapshot.tables.refused.values()) == {"the graph consumes random numbers"}


def test_naive_replaying_a_pinned_pointer_elsewhere_faults() -> None:
    model = SimModel(SMALL, 8)
    host = model.driver.memory.allocate(512, host=True)
    other = SimModel(SMALL, 9)
    with pytest.raises(GraphError):
        other.driver.read(host, 4)
