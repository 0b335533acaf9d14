"""The management library is read through its C interface; a stand-in answers as the real one would."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coldstart.machine import nvml


class FakeLibrary:
    """Two devices of one kind, written through the pointers that NVML's callers pass."""

    def __init__(self, *, cores: int | None = 16896, count_fails: bool = False, lost: int = -1) -> None:
        self.cores, self.count_fails, self.lost = cores, count_fails, lost

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return int(self.count_fails)

    def nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        buffer.value = b"580.65.06"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 15 if index == self.lost else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 150_754_820_096
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetNumGpuCores(self, handle: Any, cores: Any) -> int:
        if self.cores is None:
            return 3
        cores._obj.value = self.cores
        return 0


def install(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    @contextmanager
    def opened() -> Iterator[object]:
        yield library

    monkeypatch.setattr(nvml, "_library", opened)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary())
    first, second = nvml.query()
    assert first == second == nvml.Gpu("NVIDIA H200", 132, "9.0", 150_754_820_096, "580.65.06")


def test_an_old_driver_does_not_count_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary(cores=None))
    assert nvml.query()[0].multiprocessors is None


def test_a_lost_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary(lost=0))
    assert len(nvml.query()) == 1


def test_no_driver_and_a_failing_one_mean_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert nvml.query() == []
    install(monkeypatch, FakeLibrary(count_fails=True))
    assert nvml.query() == []


def test_a_library_that_is_absent_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvml.query() == []
