"""Fake NVML library: a replica in C, read through nvidia-ml-py."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replicas import library

from coldstart.system.devices import nvml

GIB = 1 << 30
NOT_AVAILABLE = (1 << 64) - 1
H200 = ("NVIDIA H200", 9, 0, 16896, 132)
A100 = ("NVIDIA A100-SXM4-80GB", 8, 0, 6912, 108)


class Fake:
    """The library's own switches."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.c.fake_reset()
        self.added = 0

    def add(self, kind: Any = H200, *, mig: int = -1, parent: int = -1, free: int = 100) -> str:
        name, major, minor, cores, units = kind
        uuid = f"{'MIG' if parent >= 0 else 'GPU'}-{self.added:08x}-0000-0000-0000-000000000000"
        sizes = [ctypes.c_ulonglong(140 * GIB), ctypes.c_ulonglong(free * GIB)]
        self.c.fake_add(name.encode(), uuid.encode(), major, minor, cores, units, mig, parent, *sizes)
        self.added += 1
        return uuid

    def run(self, device: int, pid: int, used: int | None) -> None:
        """Let a process hold `used` bytes of a device; None: the driver does not know how many."""
        self.c.fake_run(device, pid, ctypes.c_ulonglong(NOT_AVAILABLE if used is None else used))

    def free(self, device: int, free: int) -> None:
        """Set the GiB of a device that are free."""
        self.c.fake_free(device, ctypes.c_ulonglong(free * GIB))

    def fail(self, name: str, code: int, device: int = -1) -> None:
        self.c.fake_fail(name.encode(), code, device)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    # Once: a process loads one only.
    return library("nvml", "libnvidia-ml.so.1", tmp_path_factory.mktemp("nvml-library"))


@pytest.fixture
def fake(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in (nvml.VISIBLE, nvml.ORDER):
        monkeypatch.delenv(name, raising=False)
    made = Fake(built)
    yield made
    made.c.fake_reset()
