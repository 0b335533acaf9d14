"""NVIDIA devices as CUDA will number them for this process, through the management library: no context, no torch.

NVML counts devices by PCI bus; CUDA numbers what CUDA_VISIBLE_DEVICES leaves, the fastest first unless CUDA_DEVICE_ORDER
is PCI_BUS_ID.  The two agree where all devices are of one kind.  Under MIG a process sees one instance, whose figures
are its own.  A device that does not answer ends the list, as it does for CUDA: no figure is ever guessed.
(CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "Device Enumeration".)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coldstart.contract import environment

# FP32 lanes per multiprocessor by compute capability (CUDA C++ Programming Guide, arithmetic throughput
# table); NVML counts lanes, the key wants multiprocessors.
_LANES = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
_LANES_DEFAULT = 128
VISIBLE, ORDER = environment.CUDA_VISIBLE_DEVICES, environment.CUDA_DEVICE_ORDER


@dataclass(frozen=True)
class Gpu:
    """One device. ``memory_bytes`` is the total; ``multiprocessors`` is None if the driver does not say."""

    name: str
    multiprocessors: int | None
    compute_capability: str
    memory_bytes: int
    driver: str
    uuid: str = ""
    mig: bool = False

    @property
    def branch(self) -> str:
        """The driver's release branch: what generated code depends on."""
        return self.driver.partition(".")[0]


@dataclass
class Machine:
    """The devices of this process in order, free bytes of each, and what could not be read or decided.

    `undecided` are the kinds of devices where it cannot be told which of them CUDA takes for its first.
    """

    devices: list[Gpu] = field(default_factory=list)
    undecided: tuple[str, ...] = ()
    free: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def query() -> list[Gpu]:
    """The devices visible to this process, empty without a driver."""
    return machine().devices


def free_bytes(rank: int = 0) -> int | None:
    """Free memory of a visible device, None where there is none or no driver answers."""
    free = machine().free
    return free[rank] if rank < len(free) else None


def driver() -> str | None:
    """The exact version of the driver, None where none answers."""
    devices = query()
    return devices[0].driver if devices else None


def machine() -> Machine:
    """Devices, free memory and problems, all at one moment."""
    state = Machine()
    with _library(state) as library:
        if library is not None:
            try:
                _fill(library, state)
            except library.NVMLError as error:
                state.problems.append(f"NVML: {error}")
    return state


def _fill(library: Any, state: Machine) -> None:
    driver = library.nvmlSystemGetDriverVersion()
    for handle in _visible(library, state):
        try:
            device, free = _device(library, handle, driver)
        except library.NVMLError as error:
            state.problems.append(f"device {len(state.devices)}: {error}")
            return
        state.devices.append(device)
        state.free.append(free)


@contextmanager
def _library(state: Machine) -> Iterator[Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        yield None  # no driver on this machine: an answer, not a problem
        return
    except pynvml.NVMLError as error:
        state.problems.append(f"NVML: {error}")
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible(library: Any, state: Machine) -> Iterator[Any]:
    """Handles in CUDA's order; the first word that names nothing ends the list, as it does for CUDA."""
    physical = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
    wanted = os.environ.get(VISIBLE)
    words = [str(i) for i in range(len(physical))] if wanted is None else wanted.split(",")
    if any(word.strip().isdigit() for word in words):
        _check_order(library, physical, state)
    for word in words:
        handle = _named(library, physical, word.strip())
        if handle is None:
            if word.strip() not in ("", "-1"):
                state.problems.append(f"{VISIBLE} names {word.strip()}, which is not there")
            return
        yield handle


def _check_order(library: Any, physical: list[Any], state: Machine) -> None:
    kinds = set()
    for handle in physical:
        with suppress(library.NVMLError):  # it is named when its turn comes
            kinds.add(library.nvmlDeviceGetName(handle))
    if len(kinds) > 1 and os.environ.get(ORDER) != "PCI_BUS_ID":
        state.undecided = tuple(sorted(kinds))
        state.problems.append(
            f"{' and '.join(sorted(kinds))} are numbered by speed, which NVML does not know: set {ORDER}=PCI_BUS_ID"
        )


def _named(library: Any, physical: list[Any], word: str) -> Any:
    """The device of one word of CUDA_VISIBLE_DEVICES, or None."""
    if word.startswith("MIG-"):
        return _or_none(library, lambda: library.nvmlDeviceGetHandleByUUID(word))
    if word.startswith("GPU-"):
        matches = [h for h in physical if library.nvmlDeviceGetUUID(h).startswith(word)]
        return _instance(library, matches[0]) if len(matches) == 1 else None
    inside = word.isdigit() and int(word) < len(physical)
    return _instance(library, physical[int(word)]) if inside else None


def _instance(library: Any, handle: Any) -> Any:
    """The device itself or, where it is divided, the first of its instances: the one that CUDA sees."""
    mode = _or_none(library, lambda: library.nvmlDeviceGetMigMode(handle))
    if not mode or not mode[0]:
        return handle
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        ask = partial(library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if (instance := _or_none(library, ask)) is not None:
            return instance
    return None


def _or_none(library: Any, ask: Callable[[], Any]) -> Any:
    """None where the driver says that there is no such thing; any other error is an error."""
    try:
        return ask()
    except (library.NVMLError_NotSupported, library.NVMLError_NotFound, library.NVMLError_FunctionNotFound):
        return None


def _device(library: Any, handle: Any, driver: str) -> tuple[Gpu, int]:
    whole = _or_none(library, lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
    divided = whole is not None
    capability = ".".join(map(str, library.nvmlDeviceGetCudaComputeCapability(whole if divided else handle)))
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    units: int | None
    if divided:
        units = int(library.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount)
    else:
        lanes = _or_none(library, lambda: library.nvmlDeviceGetNumGpuCores(handle))
        units = None if lanes is None else lanes // _LANES.get(capability, _LANES_DEFAULT)
    name, uuid = library.nvmlDeviceGetName(handle), library.nvmlDeviceGetUUID(handle)
    return Gpu(name, units, capability, int(memory.total), driver, uuid, divided), int(memory.free)
