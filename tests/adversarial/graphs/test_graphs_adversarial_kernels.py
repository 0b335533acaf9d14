"""Kernels whose name is ambiguous, and graphs that must be refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.graphs_tools import SMALL, offline

from coldstart.graphs import capture
from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import GraphError, MissingKernelError
from coldstart.graphs.kernels import Ladder
from coldstart.graphs.tables import Kernel
from tests.support.graphs.driver import Library, Node, SimDriver
from tests.support.graphs.images import cubin
from tests.support.graphs.kernels import ROUTINES
from tests.support.graphs.model import Shape, SimModel, libraries

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


def _unbundled(digest: str) -> bytes:
    raise MissingKernelError("not bundled")


def test_a_binary_with_mutable_globals_is_never_loaded_twice() -> None:
    image = cubin({"k": ("scale", ROUTINES["scale"].layout)}, globals_=("counter",))
    extra = (*libraries(), Library("stateful", image, exported=False))
    kernel = (one := SimDriver(1, extra)).kernel(one.function("stateful", "k"))
    model = SimModel(SMALL, 2, driver=SimDriver(2, extra))
    with pytest.raises(MissingKernelError, match="mutable globals"):
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


def _unwatched(model: SimModel) -> None:
    """Simulate a process that did not watch its modules load and therefore knows no binaries."""
    real = model.driver.kernel
    model.driver.kernel = lambda function: replace(real(function), binary=None)  # type: ignore[method-assign]


def test_without_watching_modules_name_and_parameters_decide() -> None:
    source = SimModel(SMALL, 1)
    hidden = source.driver.kernel(source.driver.function("blas", "blas_gemm_split"))
    model = SimModel(SMALL, 2)
    _unwatched(model)
    ladder = Ladder(model.driver, model, _unbundled)
    assert model.driver.kernel(ladder.resolve(hidden)).name == "blas_gemm_split"
    with pytest.raises(MissingKernelError):
        ladder.resolve(replace(hidden, layout=((0, 8),)))


# --- refusals ---


def _refusal(spoil: object) -> str:
    """Return the reported reason for a graph to which `spoil` added a node."""
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


def test_pinned_host_pointers_are_refused() -> None:
    def call(m: SimModel) -> None:
        function = m.driver.function("twin", "twin")
        host = m.driver.memory.allocate(512, host=True)
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
