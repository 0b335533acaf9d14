"""Build the double of libcuda.so.1 once and load it into this process, where cuda-bindings then finds it by its name."""

import ctypes
import os
import shutil
import subprocess
import zlib
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from coldstart.system.devices import parker

SOURCE = Path(__file__).with_name("fake_cuda.c")
PLACE = Path(__file__).parents[3] / ".cache/tests"


@cache
def fake_cuda() -> ctypes.CDLL:
    """Return the library. Skips the test where it cannot be built, or where a real driver would be hidden."""
    if shutil.which("cc") is None or find_spec("cuda") is None or find_library("cuda") is not None:
        pytest.skip("needs a C compiler and cuda-bindings, and no NVIDIA driver")
    digest = zlib.crc32(SOURCE.read_bytes() + SOURCE.with_suffix(".h").read_bytes())
    built = PLACE / f"libcuda-{digest:08x}.so"
    if not built.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        staged = built.with_suffix(f".{os.getpid()}")
        options = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, "-o", staged, SOURCE], check=True, capture_output=True)
        staged.rename(built)
    library = ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)
    library.fake_pin.argtypes = (ctypes.c_uint64,)
    library.fake_add_node.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return library


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which the double of the driver keeps the states of processes."""
    place = tmp_path / "driver"
    place.mkdir()
    (place / parker.LIBRARY).symlink_to(fake_cuda()._name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
    monkeypatch.setenv("CUDA_FAKE_CHECKPOINTS", str(place))
    return place
