"""Kernels whose name is ambiguous, and graphs that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, offline

from coldstart.graphs.api import NodeKind
from coldstart.graphs.link import combine
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import Kernel, Tables, save
from tests.support.graphs.driver import Library, Node, SimDriver
from tests.support.graphs.images import cubin
from tests.support.graphs.kernels import ROUTINES
from tests.support.graphs.model import Shape, SimModel, libraries

# --- kernels ---


def _run(driver: SimDriver, function: int) -> float:
    x, out = driver.allocate(512), driver.allocate(512)
    driver.memory.array(x, np.float32, 1)[:] = 1
    payload = ROUTINES["scale"].fields.pack(x, out, 1)
    driver.submit(Node(NodeKind.KERNEL, payload, function))
    return float(driver.memory.array(out, np.float32, 1)[0])


def _resolve(
    tmp_path: Path, source: SimDriver, kernels: list[Kernel]
) -> tuple[SimDriver, list[int], dict[int, str]]:
    """Return another process's driver with its functions for these kernels, from a bundle."""
    model = SimModel(SMALL, 2)
    save(Tables(kernels=kernels), tmp_path, {k.binary: source.binary(k.binary) for k in kernels if k.binary})
    restorer = Restorer(tmp_path, model.driver, model)
    assert restorer.link(), restorer.fallbacks
    return model.driver, *restorer._find_kernels(kernels)


def test_two_binaries_with_one_kernel_name_are_two_kernels(tmp_path: Path) -> None:
    source = SimDriver(1, libraries())
    kernels = [source.kernel(source.function(library, "twin")) for library in ("twin", "other")]
    driver, functions, missing = _resolve(tmp_path, source, kernels)
    assert missing == {} and [_run(driver, function) for function in functions] == [2, 3]


def test_function_attributes_are_set_again(tmp_path: Path) -> None:
    source = SimDriver(1, libraries())
    handle = source.function("framework", "fw_embed")
    source.set_function_attributes(handle, [(8, 100 << 10)])
    driver, (function,), _ = _resolve(tmp_path, source, [source.kernel(handle)])
    assert driver.kernel(function).attributes == ((8, 100 << 10),)


# --- refusals ---


def _refusal(spoil: Callable[[SimModel], None], driver: SimDriver | None = None) -> str:
    """Return the reported reason for a graph to which `spoil` added a node."""
    model = SimModel(Shape("one", 1, sizes=(8,)), 5, driver=driver)
    real = model.forward

    def forward(size: int, layers: int | None = None) -> None:
        real(size, layers)
        if model.driver.capturing is not None:
            spoil(model)

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
        m.driver.submit(
            Node(NodeKind.KERNEL, ROUTINES["scale"].fields.pack(host, m._at("static:out"), 1), function)
        )

    assert "pinned host pointer" in _refusal(call)


@pytest.mark.parametrize(
    ("name", "variables", "reason"),
    [("ncclDevKernel_AllReduce", (), "collective"), ("k", ("counter",), "mutable globals")],
)
def test_kernels_whose_state_cannot_be_copied_are_refused(
    name: str, variables: tuple[str, ...], reason: str
) -> None:
    image = cubin({name: ("scale", ROUTINES["scale"].layout)}, globals_=variables)
    driver = SimDriver(5, (*libraries(), Library("stateful", image)))

    def call(m: SimModel) -> None:
        at = m._at("static:out")
        payload = ROUTINES["scale"].fields.pack(at, at, 1)
        m.driver.submit(Node(NodeKind.KERNEL, payload, m.driver.function("stateful", name)))

    assert reason in _refusal(call, driver)


def test_a_kernel_whose_binary_no_process_knows_is_refused() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    for half in (a, b):
        half.tables.kernels[:] = [
            replace(k, binary=None) if k.name == "blas_gemm_split" else k for k in half.tables.kernels
        ]
    tables = combine(a, b)
    assert sorted(tables.graphs) == ["decode:256", "decode:64"]
    assert "blas_gemm_split cannot be restored: its binary is unknown" in tables.refused["decode:1"]


def test_a_kernel_whose_binary_only_the_second_process_knows_is_recorded() -> None:
    """A process that compiles several candidates may not tell which of them it launches; the proof decides."""
    a, b = (offline(seed).snapshot for seed in (11, 12))
    a.tables.kernels[:] = [replace(k, binary=None) for k in a.tables.kernels]
    assert combine(a, b).refused == {}
