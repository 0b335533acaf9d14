"""The cuda-bindings backend in separate processes with the fake driver. This does not test a GPU."""

from __future__ import annotations

from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_cuda.build import available, build, run

from coldstart.graphs.cuda import calls
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import DriverError
from tests.support.graphs.images import cubin

LAYOUT = ((0, 8),)
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
    assert done["calls"] >= 40 and done["restored"] > 0 and done["captured"] > 0 and done["refused"] > 0
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
    assert done["without"] == [] and done["listed"] == 4


def test_a_function_is_known_by_its_binary() -> None:
    log = ModuleLog()
    one, other = (
        cubin({"k": ("scale", LAYOUT), "a": ("scale", LAYOUT)}),
        cubin({"k": ("scale_other", LAYOUT)}),
    )
    log.see(one)
    first = log.digest("k", LAYOUT, set)
    assert first is not None and log.images[first] == one
    log.see(other)
    assert log.digest("k", LAYOUT, set) is None
    assert log.digest("k", LAYOUT, lambda: {"k", "a"}) == first
    assert log.digest("k", ((0, 4),), set) is None
    log.see(b"no cubin")
    assert log.unreadable == 1


@pytest.mark.skipif(find_library("cuda") is not None, reason="a driver is installed")
def test_backend_reports_a_missing_driver() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(DriverError, match="cuInit"):
        CudaDriver()


def test_old_bindings_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "import_module", lambda name: SimpleNamespace(__version__="12.9.1"))
    calls.bindings.cache_clear()
    with pytest.raises(DriverError, match=r"12\.9\.1 is too old: coldstart install"):
        calls.bindings()
    calls.bindings.cache_clear()
