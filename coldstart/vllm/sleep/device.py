"""Memory for the weights of an awake engine: GPU memory, or memory files on the CPU.

Both kinds of memory unmap a region but keep its addresses reserved, so that tensors, compiled code and CUDA graphs are valid
when it is mapped again. The caller restores the bytes of a region.

Invariant: a call that fails leaves each region either mapped or unmapped, as `is_mapped` reports.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from coldstart.graphs.cuda.driver import bindings, call, primary_context
from coldstart.graphs.errors import DriverError
from coldstart.system.proc.mappings import (
    NO_ACCESS,
    PAGE,
    Region,
    find_complete_pages,
    free_pages,
    map_memory,
)
from coldstart.vllm.sleep.memory import hash_tensor

WEIGHTS = "weights"
_CHUNK_WORDS = 1 << 20


class MemoryFileWeights:
    """Weights of one CPU engine in memory files. `move_tensors` moves them there."""

    def __init__(self) -> None:
        self._regions, self._mapped = list[Region](), set[Region]()

    def move_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move each tensor's storage to its own memory region. Tensors that share a storage share its region."""
        moved: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            if storage.data_ptr() not in moved:
                region = Region(0, -(-storage.nbytes() // PAGE) * PAGE)
                region = region._replace(address=map_memory(region.size, access=NO_ACCESS))
                self._regions.append(region)
                self.map(region)
                held = (ctypes.c_char * storage.nbytes()).from_address(region.address)
                moved[storage.data_ptr()] = torch.frombuffer(held, dtype=torch.uint8).untyped_storage()
                moved[storage.data_ptr()].copy_(storage)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(moved[storage.data_ptr()], *place)

    def regions(self) -> list[Region]:
        return self._regions

    def is_mapped(self, region: Region) -> bool:
        return region in self._mapped

    def map(self, region: Region) -> None:
        descriptor = os.memfd_create("coldstart-device", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, region.size)
            map_memory(region.size, descriptor, region.address)
        finally:
            os.close(descriptor)  # the mapping keeps the memory
        self._mapped.add(region)

    def unmap(self, region: Region) -> None:
        # Keep the addresses reserved, so that nothing else is mapped there.
        map_memory(region.size, at=region.address, access=NO_ACCESS)
        self._mapped.discard(region)

    def read(self, region: Region, to: int) -> None:
        ctypes.memmove(to, region.address, region.size)

    def write(self, region: Region, source: int) -> None:
        ctypes.memmove(region.address, source, region.size)

    def synchronize(self) -> None:
        """Return immediately, because the copies are synchronous."""

    def digest(self, tensor: torch.Tensor) -> str:
        return hash_tensor(tensor)

    def pin(self, address: int, size: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        """Do nothing, because no memory is pinned."""


class CudaWeights:
    """Weights of one GPU engine: the allocations in vLLM's CuMemAllocator that have the tag `weights`.

    `allocations` is the allocator's table. It maps an address to an object with `tag`, `is_asleep` and `handle`, a tuple
    of device, size, address, and the address of the word that contains the driver's handle. vLLM's allocator uses that
    word to free an allocation, so a new handle is written there.
    """

    def __init__(self, allocations: Mapping[int, Any], ordinal: int = 0) -> None:
        self.d, self._allocations, self._ordinal = bindings(), allocations, ordinal
        self._context = primary_context(ordinal)
        self._stream = call(self.d.cuStreamCreate, 1)  # this stream does not wait for the default stream
        self._pending: list[tuple[Any, ...]] = []
        self._key = secrets.randbits(62)

    def regions(self) -> list[Region]:
        found = self._allocations.items()
        return [Region(address, data.handle[1]) for address, data in found if data.tag == WEIGHTS]

    def is_mapped(self, region: Region) -> bool:
        return not self._allocations[region.address].is_asleep

    def map(self, region: Region) -> None:
        self._finish()
        data, d = self._allocations[region.address], self.d
        address = d.CUdeviceptr(region.address)
        handle = call(d.cuMemCreate, region.size, _build_properties(self._ordinal), 0)
        self._pending.append((d.cuMemRelease, handle))
        try:
            call(d.cuMemMap, address, region.size, 0, handle, 0)
            self._pending.append((d.cuMemUnmap, address, region.size))
            call(d.cuMemSetAccess, address, region.size, [_build_access(self._ordinal)], 1)
        except DriverError:
            with suppress(DriverError):  # the next call repeats it
                self._finish()
            raise
        self._pending.clear()
        self._word(data).value = int(handle)
        data.is_asleep = False

    def unmap(self, region: Region) -> None:
        self._finish()
        data, d = self._allocations[region.address], self.d
        call(d.cuMemUnmap, d.CUdeviceptr(region.address), region.size)
        data.is_asleep = True
        self._pending.append((d.cuMemRelease, d.CUmemGenericAllocationHandle(self._word(data).value)))
        self._finish()

    def _finish(self) -> None:
        """Complete or undo earlier driver calls, the newest first. A call that fails is repeated next time."""
        while self._pending:
            call(*self._pending[-1])
            self._pending.pop()

    @staticmethod
    def _word(data: Any) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(data.handle[3])

    def read(self, region: Region, to: int) -> None:
        call(self.d.cuMemcpyDtoHAsync, to, self.d.CUdeviceptr(region.address), region.size, self._stream)

    def write(self, region: Region, source: int) -> None:
        call(self.d.cuMemcpyHtoDAsync, self.d.CUdeviceptr(region.address), source, region.size, self._stream)

    def synchronize(self) -> None:
        call(self.d.cuStreamSynchronize, self._stream)

    def digest(self, tensor: torch.Tensor) -> str:
        return compute_checksum(tensor, self._key)

    def pin(self, address: int, size: int) -> bool:
        call(self.d.cuMemHostRegister, address, size, 0)
        return True

    def unpin(self, address: int) -> None:
        call(self.d.cuCtxSetCurrent, self._context)  # another thread may call this
        call(self.d.cuMemHostUnregister, address)


def _build_properties(ordinal: int) -> Any:
    """Return the memory properties that vLLM's allocator uses."""
    d, properties = bindings(), bindings().CUmemAllocationProp()
    properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    attribute = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    with suppress(DriverError):  # older drivers do not have the attribute
        properties.allocFlags.gpuDirectRDMACapable = int(call(d.cuDeviceGetAttribute, attribute, ordinal))
    return properties


def _build_access(ordinal: int) -> Any:
    d, access = bindings(), bindings().CUmemAccessDesc()
    access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class ExportableMemory:
    """Memory of the GPU `ordinal` that another process can map. All methods raise DriverError.

    The driver frees an allocation when no process has a handle, a mapping or a descriptor of it (`cuMemRelease`). Therefore
    a mapping stays valid when the process that allocated the memory has ended, which CUDA IPC does not ensure.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.d, self._ordinal = bindings(), ordinal
        self._context = primary_context(ordinal)
        self._kind = self.d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def allocate(self, size: int) -> tuple[Region, Any]:
        """Allocate at least `size` bytes. Return where they are mapped, and their handle."""
        properties = _build_properties(self._ordinal)
        properties.requestedHandleTypes = self._kind
        smallest = self.d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(call(self.d.cuMemGetAllocationGranularity, properties, smallest))
        size = -(-size // unit) * unit
        handle = call(self.d.cuMemCreate, size, properties, 0)
        with ExitStack() as undo:
            undo.callback(call, self.d.cuMemRelease, handle)
            region = self._map(handle, size)
            undo.pop_all()
        return region, handle

    def export(self, handle: Any) -> int:
        """Return a new file descriptor of an allocation."""
        call(self.d.cuCtxSetCurrent, self._context)  # another thread may call this
        return int(call(self.d.cuMemExportToShareableHandle, handle, self._kind, 0))

    def map_descriptor(self, descriptor: int, size: int) -> Region:
        """Map another process's allocation of `size` bytes. The caller may close the descriptor then."""
        handle = call(self.d.cuMemImportFromShareableHandle, descriptor, self._kind)
        with ExitStack() as undo:
            undo.callback(call, self.d.cuMemRelease, handle)  # the mapping keeps the memory
            return self._map(handle, size)

    def _map(self, handle: Any, size: int) -> Region:
        with ExitStack() as undo:
            address = call(self.d.cuMemAddressReserve, size, 0, 0, 0)
            undo.callback(call, self.d.cuMemAddressFree, address, size)
            call(self.d.cuMemMap, address, size, 0, handle, 0)
            undo.callback(call, self.d.cuMemUnmap, address, size)
            call(self.d.cuMemSetAccess, address, size, [_build_access(self._ordinal)], 1)
            undo.pop_all()
        return Region(int(address), size)

    def unmap(self, region: Region) -> None:
        """Unmap an allocation that no tensor uses."""
        call(self.d.cuMemUnmap, self.d.CUdeviceptr(region.address), region.size)
        call(self.d.cuMemAddressFree, self.d.CUdeviceptr(region.address), region.size)

    def synchronize(self) -> None:
        """Wait until the device has done all work of this process."""
        call(self.d.cuCtxSynchronize)


WeightsDevice = MemoryFileWeights | CudaWeights
"""Memory regions that can be unmapped and mapped again at the same addresses."""


def free_tensor_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory pages of CPU tensors, which then read as zero. Partial pages keep their bytes."""
    for storage in {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}.values():
        pages = find_complete_pages(storage.data_ptr(), storage.nbytes())
        if pages.size:
            free_pages(*pages)


def compute_checksum(tensor: torch.Tensor, key: int) -> str:
    """Return a keyed checksum of a tensor, computed on the tensor's device.

    It consists of two multilinear hashes over 32-bit words modulo 2**64, with one random factor for each word. If the key
    is chosen after the tensors, two different tensors have the same checksum with a probability of 2**-64. It is not a
    cryptographic hash: a program that knows the key can construct a collision.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    lanes = []
    for lane in range(2):
        random = torch.Generator(device=data.device).manual_seed(key + lane)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for chunk in data.split(4 * _CHUNK_WORDS):
            words = torch.nn.functional.pad(chunk, (0, -len(chunk) % 4)).view(torch.int32).to(torch.int64)
            factors = torch.randint(
                -(1 << 62), 1 << 62, words.shape, generator=random, device=data.device, dtype=torch.int64
            )
            total += (words * factors).sum()
        lanes.append(int(total) & (1 << 64) - 1)
    return f"{tensor.dtype} {tuple(tensor.shape)} {lanes[0]:016x}{lanes[1]:016x}"
