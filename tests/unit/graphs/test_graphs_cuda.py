"""The driver calls over cuda-bindings, on a double of libcuda, and the binaries of functions as CUPTI shows them."""

import ctypes
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cubins import assembler
from cubins import cubin as compile_cubin
from support.graphs_tools import SMALL

from coldstart.graphs.api import KernelNode
from coldstart.graphs.cuda import driver, modules
from coldstart.graphs.cuda.modules import ModuleLog, ModuleWatch
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import AlteredTableError, DriverError
from coldstart.graphs.record import GraphBuilder, create_snapshot
from coldstart.graphs.tables import Kernel, find_tensor_map_offsets
from tests.support.graphs.images import cubin
from tests.support.graphs.model import SimModel

LAYOUT = ((0, 8),)
CUPTI_HEADER = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/include/cupti_driver_cbid.h"


def test_launch_attributes_and_flags_of_captured_graphs() -> None:
    """The attributes are read through the driver's structures; the flags of an instantiation are those of PyTorch."""
    model = SimModel(SMALL, 5)
    captured, d = {key: model.capture(key) for key in model.sizes}, model.driver.d
    assert model.fake.fake_last_flags() == 1 | 8

    def refused() -> dict[str, str]:
        return create_snapshot(model.driver, model, captured).tables.refused

    for error, unreadable in ((1, False), (801, False), (999, True)):
        model.fake.fake_attribute_error(8, error)
        assert [*refused()] == list(captured) * unreadable
        assert all("CUDA_ERROR_UNKNOWN" in reason for reason in refused().values())
    model.fake.fake_attribute_error(-1, 0)
    kernel = next(n for n in model.driver.nodes(captured["decode:8"].graph) if model.driver.kind(n) == 0)
    value = d.CUkernelNodeAttrValue()
    policy = value.accessPolicyWindow
    policy.num_bytes = 4096
    value.accessPolicyWindow = policy
    d.cuGraphKernelNodeSetAttribute(d.CUgraphNode(kernel), d.CUlaunchAttributeID(1), value)
    assert refused() == {"decode:8": "a kernel node has an access policy window, which cannot be restored"}


class Cupti:
    """Calls the callback of a subscription as CUPTI does, with its structures."""

    def __init__(self) -> None:
        self.enabled: list[tuple[int, int]] = []

    def cuptiSubscribe(self, subscriber: object, callback: Any, data: object) -> int:
        self._callback = callback
        return 0

    def cuptiEnableCallback(self, on: int, subscriber: object, domain: int, number: int) -> int:
        self.enabled.append((domain, number))
        return 0

    def load(self, number: int, module: int, *images: bytes) -> None:
        """One call of the driver with this number that loads these binaries."""
        target = ctypes.c_void_p(0)
        parameters = (ctypes.c_void_p * 2)(ctypes.addressof(target), 0)
        for site in (0, 1):
            call = modules._Call(site, b"cuModuleLoadData", ctypes.addressof(parameters))
            if (modules.DRIVER_API, number) in self.enabled:
                self._callback(None, modules.DRIVER_API, number, ctypes.addressof(call))
            for image in images if not site else ():
                held = ctypes.create_string_buffer(image, len(image))
                loaded = modules._Module(1, len(image), ctypes.addressof(held))
                resource = modules._Resource(0, 0, ctypes.addressof(loaded))
                self._callback(None, modules.RESOURCE, modules.MODULE_LOADED, ctypes.addressof(resource))
            target.value = module


def test_a_function_is_known_by_the_module_that_it_was_loaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor gives different kernels one name, and an autotuner loads all candidates."""
    log, cupti = ModuleLog(), Cupti()
    one, other = (cubin({"k": ("scale", LAYOUT)}, salt=salt) for salt in ("4 warps", "8 warps"))
    monkeypatch.setattr(modules, "load_cupti", lambda: cupti)
    watch = ModuleWatch(log)
    cupti.load(19, 0x100, one)
    cupti.load(18, 0x200, other)
    cupti.load(678, 0x300, cubin({"lazy": ("scale", LAYOUT)}))
    found = [log.digest(module, "k", LAYOUT, lambda: {"k"}) for module in (0x100, 0x200, 0x300)]
    assert [log.images[digest] if digest else None for digest in found] == [one, other, None]
    assert log.digest(0x300, "lazy", LAYOUT, set) and not log.digest(0x300, "lazy", ((0, 4),), set)
    assert log.record(b"no cubin") is None
    cupti.load(20, 0x100, other)
    assert log.digest(0x100, "k", LAYOUT, set) == found[1]
    del watch


@pytest.mark.skipif(not CUPTI_HEADER.exists(), reason="CUPTI's headers are not installed")
def test_numbers_of_the_driver_calls_are_those_of_cupti() -> None:
    defined = dict(re.findall(r"CUPTI_DRIVER_TRACE_CBID_(\w+)\s*=\s*(\d+)", CUPTI_HEADER.read_text()))
    names = ("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary")
    assert tuple(int(defined[name]) for name in names) == modules.MODULE_LOADS


def test_old_bindings_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "import_module", lambda name: SimpleNamespace(__version__="12.9.1"))
    driver.bindings.cache_clear()
    with pytest.raises(DriverError, match=r"12\.9\.1 is too old; run `coldstart install gpu`"):
        driver.bindings()
    driver.bindings.cache_clear()


@pytest.mark.parametrize("cut", [0, 4, 63, 64, 200, -1])
def test_a_cut_cubin_is_refused(cut: int) -> None:
    with pytest.raises(AlteredTableError):
        read_cubin(cubin({"k": ("scale", ((0, 8), (8, 4), (16, 128), (144, 1)))})[:cut])


TILES_SIZE, TILES_MAPS = 640, (128, 384)


@pytest.mark.skipif(assembler() is None, reason="no ptxas: Triton is not installed here")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_names_layouts_and_state_equal_the_source(architecture: str) -> None:
    """Functions, texts and tables are no state; variables that persist between launches are."""
    found = read_cubin(compile_cubin("objects", architecture))
    kernels = ("uses_objects", "uses_text", "uses_tables")
    assert found.mutable_globals == () and found.kernels == dict.fromkeys(kernels, ((0, 8), (8, 4)))
    assert read_cubin(compile_cubin("state", architecture)).mutable_globals == ("history", "tickets")


@pytest.mark.skipif(assembler() is None, reason="no ptxas: Triton is not installed here")
def test_hopper_parameters() -> None:
    """Offsets count from the start of the bank, which is not 128-byte aligned; parameters may exceed 16 KiB since CUDA 12.1."""
    found = read_cubin(compile_cubin("hopper", "sm_90a"))
    (at, size), (after, tail) = layout = found.kernels.pop("reads_tiles")
    assert (size, tail) == (TILES_SIZE, 128) and after == at + size and found.mutable_globals == ()
    assert found.kernels == {
        "in_clusters": ((0, 8),), "in_a_grid": ((0, 8),), "takes_much": ((0, 20000), (20000, 8)),
    }  # fmt: skip
    # A tensor map may be in a struct parameter whose offset in the packed buffer is only a multiple of 16.
    builder, kernel = GraphBuilder(), Kernel("reads_tiles", None, layout)
    builder.add_kernel(KernelNode(1, (1, 1, 1), (1, 1, 1), 0, bytes(kernel.size)), kernel)
    builder.finish("one", 1, [1], [])
    candidates = find_tensor_map_offsets(builder.graphs["one"], [kernel]).tolist()
    assert {at + place for place in TILES_MAPS} | {after} <= set(candidates)
    assert all(any(o <= at and at + 128 <= o + size for o, size in layout) for at in candidates)
