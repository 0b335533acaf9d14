"""The cuda-bindings backend in separate processes with the fake driver. This does not test a GPU."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cuda.build import available, build, run

from coldstart.graphs.cuda import driver, modules
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.cuda.modules import ModuleLog, ModuleWatch
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import AlteredTableError, DriverError
from tests.support.graphs.images import cubin

LAYOUT = ((0, 8),)
CUPTI_HEADER = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/include/cupti_driver_cbid.h"
needs_fake = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture(scope="module")
def bundle_directory(fake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cuda")
    run(fake, "snapshot", 1, root / "a")
    done = run(fake, "bundle", 2, root / "a", root / "b")
    assert done["refused"] == {} and done["report"]["pointers"] == 42, done
    return root / "b"


@needs_fake
def test_capture_to_proof_in_three_processes(fake: Path, bundle_directory: Path) -> None:
    done = run(fake, "prove", 3, bundle_directory)
    assert done["proven"] == ["decode:4", "decode:16", "decode:64"] and done["failed"] == {}
    assert done["edge_data"] == [[1, 1], [2, 1]]
    assert done["attributes"] == [[6, "01"], [8, "02"]]


@pytest.mark.slow
@needs_fake
def test_every_driver_call_fails_in_turn(fake: Path, bundle_directory: Path) -> None:
    done = run(fake, "faults", 4, bundle_directory)
    assert done["calls"] >= 40 and done["restored"] > 0 and done["refused"] > 0
    assert done["wrong"] == 0 and done["crashed"] == 0, done["stderr"]


@needs_fake
def test_launch_attributes_and_flags(fake: Path) -> None:
    """Read the attributes through the driver's structures; the instantiation flags are those of PyTorch."""
    done = run(fake, "readings", 5)
    assert done["flags"] == 1 | 8
    assert done["invalid"] == done["unsupported"] == done["properties"] == {}
    assert set(done["unknown"]) == {"decode:4", "decode:16", "decode:64"}
    assert all("CUDA_ERROR_UNKNOWN" in reason for reason in done["unknown"].values())
    assert done["window"] == {"decode:4": "a node has an access-policy window"}


@needs_fake
def test_a_driver_that_lists_no_functions_records_every_graph(fake: Path) -> None:
    done = run(fake, "unlisted", 5)
    assert done["refused"] == {} and len(done["keys"]) == 3


def _twins() -> tuple[bytes, bytes]:
    """Return two binaries that define one function, as an autotuner compiles them."""
    one, other = (cubin({"k": ("scale", LAYOUT)}, salt=salt) for salt in ("4 warps", "8 warps"))
    return one, other


def test_a_function_is_known_by_its_binary() -> None:
    log = ModuleLog()
    one, other = (
        cubin({"k": ("scale", LAYOUT), "a": ("scale", LAYOUT)}),
        cubin({"k": ("scale_other", LAYOUT)}),
    )
    first = log.see(one)
    assert first is not None and log.digest(1, "k", LAYOUT, set) == first and log.images[first] == one
    log.see(other)
    assert log.digest(1, "k", LAYOUT, set) is None
    assert log.digest(1, "k", LAYOUT, lambda: {"k", "a"}) == first
    assert log.digest(1, "k", ((0, 4),), set) is None
    assert log.see(b"no cubin") is None


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
    log, cupti, (one, other) = ModuleLog(), Cupti(), _twins()
    monkeypatch.setattr(modules, "library", lambda: cupti)
    watch = ModuleWatch(log)
    cupti.load(19, 0x100, one)
    cupti.load(18, 0x200, other)
    cupti.load(678, 0x300, cubin({"lazy": ("scale", LAYOUT)}))
    found = [log.digest(module, "k", LAYOUT, lambda: {"k"}) for module in (0x100, 0x200, 0x300)]
    assert [log.images[digest] if digest else None for digest in found] == [one, other, None]
    assert log.digest(0x300, "lazy", LAYOUT, set) is not None
    cupti.load(20, 0x100, other)
    assert log.digest(0x100, "k", LAYOUT, set) == found[1]
    del watch


@pytest.mark.skipif(not CUPTI_HEADER.exists(), reason="CUPTI's headers are not installed")
def test_numbers_of_the_driver_calls_are_those_of_cupti() -> None:
    defined = dict(re.findall(r"CUPTI_DRIVER_TRACE_CBID_(\w+)\s*=\s*(\d+)", CUPTI_HEADER.read_text()))
    names = ("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary")
    assert tuple(int(defined[name]) for name in names) == modules.MODULE_LOADS


@pytest.mark.skipif(find_library("cuda") is not None, reason="a driver is installed")
def test_backend_reports_a_missing_driver() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(DriverError, match="cuInit"):
        CudaDriver()


def test_old_bindings_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "import_module", lambda name: SimpleNamespace(__version__="12.9.1"))
    driver.bindings.cache_clear()
    with pytest.raises(DriverError, match=r"12\.9\.1 is too old: coldstart install"):
        driver.bindings()
    driver.bindings.cache_clear()


@pytest.mark.parametrize("cut", [0, 4, 63, 64, 200, -1])
def test_a_cut_cubin_is_refused(cut: int) -> None:
    with pytest.raises(AlteredTableError):
        read_cubin(cubin({"k": ("scale", ((0, 8), (8, 4), (16, 128), (144, 1)))})[:cut])
