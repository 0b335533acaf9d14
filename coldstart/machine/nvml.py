"""NVIDIA devices through the management library (NVML) by ctypes: no context, no torch, no subprocess."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coldstart.contract import environment

# FP32 lanes per multiprocessor by compute capability (CUDA C++ Programming Guide, arithmetic throughput
# table); NVML counts lanes, the key wants multiprocessors.
_LANES = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
_LANES_DEFAULT = 128


@dataclass(frozen=True)
class Gpu:
    """One device. ``memory_bytes`` is the total; ``multiprocessors`` is None if the driver does not say."""

    name: str
    multiprocessors: int | None
    compute_capability: str
    memory_bytes: int
    driver: str


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def query() -> list[Gpu]:
    """The devices visible to this process (CUDA_VISIBLE_DEVICES by index), empty without a driver."""
    with _library() as library:
        if library is None:
            return []
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        driver = _text(library.nvmlSystemGetDriverVersion)
        found = [_device(library, index, driver) for index in visible(count.value)]
        return [device for device in found if device is not None]


def free_bytes() -> int | None:
    """Free memory of the first visible device, None where no driver answers."""
    with _library() as library:
        count = ctypes.c_uint()
        if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        handle, memory = ctypes.c_void_p(), _Memory()
        for index in visible(count.value):
            if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
                return int(memory.free)
    return None


def visible(count: int) -> list[int]:
    """Indices below ``count`` that CUDA_VISIBLE_DEVICES leaves; all where it names devices by UUID."""
    wanted = os.environ.get(environment.CUDA_VISIBLE_DEVICES)
    if wanted is None or "GPU-" in wanted or "MIG-" in wanted:
        return list(range(count))
    return [int(part) for part in wanted.split(",") if part.strip().isdigit() and int(part) < count]


@contextmanager
def _library() -> Iterator[ctypes.CDLL | None]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None  # no driver on this machine: an answer, not an error
        return
    if library.nvmlInit_v2():
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _device(library: ctypes.CDLL, index: int, driver: str) -> Gpu | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None  # fallen off the bus, or not this user's
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    capability = f"{major.value}.{minor.value}"
    return Gpu(
        name=_text(library.nvmlDeviceGetName, handle),
        multiprocessors=_multiprocessors(library, handle, capability),
        compute_capability=capability,
        memory_bytes=memory.total,
        driver=driver,
    )


def _multiprocessors(library: ctypes.CDLL, handle: ctypes.c_void_p, capability: str) -> int | None:
    cores = ctypes.c_uint()
    if library.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)):
        return None
    return cores.value // _LANES.get(capability, _LANES_DEFAULT)


def _text(function: Callable[..., int], *arguments: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    failed = function(*arguments, buffer, ctypes.c_uint(len(buffer)))
    return "" if failed else buffer.value.decode(errors="replace")
