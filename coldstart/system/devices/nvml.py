"""NVIDIA GPUs in this process's CUDA device order, read through NVML without a CUDA context or torch.

NVML numbers GPUs by PCI bus. CUDA numbers the GPUs in CUDA_VISIBLE_DEVICES, the fastest first unless CUDA_DEVICE_ORDER is
PCI_BUS_ID. Both orders agree if all GPUs are the same model. Under MIG, a process sees one instance with its own memory
and multiprocessors. As in CUDA, enumeration stops at the first GPU that does not respond. Unknown values are omitted.
(CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "Device Enumeration".)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from coldstart.contract import environment
from coldstart.system.proc import processes

# FP32 lanes per multiprocessor by compute capability (CUDA C++ Programming Guide, arithmetic throughput table).
# NVML reports lanes, and the key contains multiprocessors.
_LANES = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
_LANES_DEFAULT = 128
VISIBLE, ORDER = environment.CUDA_VISIBLE_DEVICES, environment.CUDA_DEVICE_ORDER


@dataclass(frozen=True)
class Gpu:
    """One GPU or MIG instance, with its total memory. `multiprocessors` is None if the driver does not report it."""

    name: str
    multiprocessors: int | None
    compute_capability: str
    memory_bytes: int
    driver: str
    uuid: str = ""


@dataclass
class GpuState:
    """GPUs of this process in CUDA order, the free memory of each GPU in bytes, and errors that occurred while reading them."""

    devices: list[Gpu] = field(default_factory=list)
    free_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_gpus() -> list[Gpu]:
    """Return the GPUs visible to this process, or none without a driver."""
    return read_gpu_state().devices


def read_driver_version() -> str | None:
    """Return the exact driver version, or None without a GPU."""
    devices = list_gpus()
    return devices[0].driver if devices else None


def read_gpu_state() -> GpuState:
    """Return the GPUs, their free memory and any errors, all read at the same time."""
    state = GpuState()
    with _library(state) as library:
        if library is None:
            return state
        try:
            driver = library.nvmlSystemGetDriverVersion()
            for handle in _list_visible(library, state):
                try:
                    device, free = _read_device(library, handle, driver)
                except library.NVMLError as error:
                    state.problems.append(f"device {len(state.devices)}: {error}")
                    break
                state.devices.append(device)
                state.free_bytes.append(free)
        except library.NVMLError as error:
            state.problems.append(f"NVML: {error}")
    return state


def read_process_memory() -> dict[int, int | None]:
    """Return the GPU memory in bytes that each process uses, summed over all GPUs of this machine, by PID.

    A value is None if the driver does not report it. The result is empty without a driver, if a GPU does not respond, or
    if a PID does not exist in this PID namespace, because older drivers report PIDs of the host.
    """
    found: dict[int, int | None] = {}
    with _library(GpuState()) as library:
        if library is None:
            return {}
        try:
            devices = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
            for handle in chain.from_iterable(_list_instances(library, device) for device in devices):
                # Without a version in its name, the call raises NVMLLibraryMismatchError, no NVMLError, if the driver lacks it.
                for process in library.nvmlDeviceGetComputeRunningProcesses_v3(handle):
                    known, used = found.get(process.pid, 0), process.usedGpuMemory
                    found[process.pid] = None if known is None or used is None else known + used
        except library.NVMLError:
            return {}
    import psutil

    return found if all(map(psutil.pid_exists, found)) else {}


def read_tree_memory(pid: int) -> int | None:
    """Return the GPU memory in bytes that a process and its descendants use, or None if the driver does not report it.

    Raises ProcessLookupError if the process has exited.
    """
    known = read_process_memory()
    sizes = [known[one] for one in processes.list_tree(pid) if one in known] if known else []
    return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


class PeakMemory:
    """Peak GPU memory of a process and its descendants during a `with` block.

    Enter the block before the process allocates GPU memory. If the driver does not report memory by process, as in a
    container with its own PID namespace, the peak is the decrease in free memory of the visible GPUs, which includes the
    memory of other processes.
    """

    INTERVAL_S = 0.25

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = read_gpu_state().free_bytes
        self._held = self._missing = 0  # peaks, by process and by free memory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-memory", daemon=True)

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak in bytes, or None if no memory was used or no GPU responds."""
        return self._held or self._missing or None

    def __enter__(self) -> PeakMemory:
        if self._before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._before:
            self._thread.join()
            self._sample()

    def _run(self) -> None:
        while not self._ended.wait(self.INTERVAL_S):
            self._sample()

    def read_current_bytes(self) -> int | None:
        """Return the memory in use now in bytes, measured in the same way as the peak, or None if there is no peak."""
        held, missing = self._read()
        return (held if self._held else missing) if self.peak_bytes else None

    def _sample(self) -> None:
        held, missing = self._read()
        self._held, self._missing = max(self._held, held), max(self._missing, missing)

    def _read(self) -> tuple[int, int]:
        held = 0
        with suppress(ProcessLookupError):
            held = read_tree_memory(self._pid) or 0
        free = zip(self._before, read_gpu_state().free_bytes, strict=False)
        return held, sum(max(0, before - now) for before, now in free)


@contextmanager
def _library(state: GpuState) -> Iterator[Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        yield None  # a machine without a driver is not a problem
        return
    except pynvml.NVMLError as error:
        state.problems.append(f"NVML: {error}")
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _list_visible(library: Any, state: GpuState) -> Iterator[Any]:
    """Yield the handles of the visible GPUs in CUDA's order.

    The first entry that matches no device ends the list, as in CUDA.
    """
    physical = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
    wanted = os.environ.get(VISIBLE)
    words = [str(i) for i in range(len(physical))] if wanted is None else wanted.split(",")
    if any(word.strip().isdigit() for word in words) and os.environ.get(ORDER) != "PCI_BUS_ID":
        names = set()
        for handle in physical:
            with suppress(library.NVMLError):  # the error is reported when the device is read
                names.add(library.nvmlDeviceGetName(handle))
        if len(names) > 1:
            kinds = " and ".join(sorted(names))
            state.problems.append(
                f"{kinds} are numbered by speed, which NVML does not report: set {ORDER}=PCI_BUS_ID"
            )
            return
    for word in words:
        handle = _find_listed_device(library, physical, word.strip())
        if handle is None:
            if word.strip() not in ("", "-1"):
                state.problems.append(f"{VISIBLE} names {word.strip()}, but no such device exists")
            return
        yield handle


def _find_listed_device(library: Any, physical: list[Any], word: str) -> Any:
    """Return the device for one entry of CUDA_VISIBLE_DEVICES, or None."""
    if word.startswith("MIG-"):
        return _call_or_none(library, lambda: library.nvmlDeviceGetHandleByUUID(word))
    if word.startswith("GPU-"):
        matches = [h for h in physical if library.nvmlDeviceGetUUID(h).startswith(word)]
    else:
        matches = physical[int(word) :][:1] if word.isdigit() else []
    # Under MIG, CUDA sees the first instance.
    return next(_list_instances(library, matches[0]), None) if len(matches) == 1 else None


def _list_instances(library: Any, handle: Any) -> Iterator[Any]:
    """Yield the MIG instances of a GPU, or the GPU itself without MIG."""
    mode = _call_or_none(library, lambda: library.nvmlDeviceGetMigMode(handle))
    if not mode or not mode[0]:
        yield handle
        return
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        ask = partial(library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if (instance := _call_or_none(library, ask)) is not None:
            yield instance


def _call_or_none(library: Any, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or None if the driver reports that the object or property does not exist.

    Driver 580 reports an invalid argument instead of "not found" for a full GPU where a MIG instance is expected.
    """
    absent = (
        library.NVMLError_NotSupported, library.NVMLError_NotFound, library.NVMLError_FunctionNotFound,
        library.NVMLError_InvalidArgument,
    )  # fmt: skip
    try:
        return call()
    except absent:
        return None


def _read_device(library: Any, handle: Any, driver: str) -> tuple[Gpu, int]:
    whole = _call_or_none(library, lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
    divided = whole is not None
    capability = ".".join(map(str, library.nvmlDeviceGetCudaComputeCapability(whole if divided else handle)))
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    units: int | None
    if divided:
        units = int(library.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount)
    else:
        lanes = _call_or_none(library, lambda: library.nvmlDeviceGetNumGpuCores(handle))
        units = None if lanes is None else lanes // _LANES.get(capability, _LANES_DEFAULT)
    name, uuid = library.nvmlDeviceGetName(handle), library.nvmlDeviceGetUUID(handle)
    return Gpu(name, units, capability, int(memory.total), driver, uuid), int(memory.free)
