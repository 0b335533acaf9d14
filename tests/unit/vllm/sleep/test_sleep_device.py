"""Both forms of a device: what a region contains after it was unmapped."""

import ctypes
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from coldstart.graphs.cuda.driver import bindings, call
from coldstart.graphs.errors import DriverError
from tests.support.graphs.library import fake_cuda

torch = pytest.importorskip("torch")
device = pytest.importorskip("coldstart.vllm.sleep.device")
pytestmark = pytest.mark.slow
SIZE = 1 << 16


def test_adopted_tensors_keep_their_values_and_share_storage() -> None:
    weights = device.MemoryFileWeights()
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    one, other = torch.nn.Parameter(base.t(), requires_grad=False), base[1:]
    weights.move_tensors([one, other])
    assert one.shape == (6, 4) and torch.equal(one, torch.arange(24.0).reshape(4, 6).t())
    other[0, 0] = 99
    assert one[0, 1] == 99 and len(weights.regions()) == 1
    (region,) = weights.regions()
    address = one.data_ptr()
    weights.unmap(region)
    assert not weights.is_mapped(region)
    weights.map(region)
    assert one.data_ptr() == address and not one.any()


def test_a_region_that_cannot_be_mapped_stays_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = device.MemoryFileWeights()
    weights.move_tensors([torch.ones(1)])
    (region,) = weights.regions()
    weights.unmap(region)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(device, "map_memory", Mock(side_effect=OSError(12, "no memory")))
        with pytest.raises(OSError, match="no memory"):
            weights.map(region)
    assert not weights.is_mapped(region)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    weights.map(region)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def test_checksum_depends_on_each_bit_and_on_the_key(dtype: torch.dtype) -> None:
    one = torch.zeros(3, 7, dtype=dtype)
    found = {device.compute_checksum(one, 1)}
    for index in range(one.numel() * one.element_size()):
        for bit in (0, 7):
            other = one.clone()
            other.reshape(-1).view(torch.uint8)[index] = 1 << bit
            found.add(device.compute_checksum(other, 1))
    assert len(found) == 1 + 2 * one.numel() * one.element_size()
    assert device.compute_checksum(one, 1) == device.compute_checksum(one.clone(), 1)
    other = torch.ones(3, 7, dtype=dtype)
    assert device.compute_checksum(other, 1) != device.compute_checksum(other, 2)
    assert device.compute_checksum(other, 1) != device.compute_checksum(other.reshape(7, 3), 1)


class Driver:
    """Allocations as vLLM's CuMemAllocator makes them, in the double of the driver."""

    def __init__(self, count: int = 3, tags: tuple[str, ...] = ("weights",)) -> None:
        self.fake, self.d = fake_cuda(), bindings()
        self.fake.fake_fail_at(-1, 0)
        self.words, allocations = [], dict[int, Any]()
        self.physical = self.fake.fake_physical()
        for number in range(count):
            address = int(call(self.d.cuMemAddressReserve, SIZE, 0, 0, 0))
            word = ctypes.c_uint64()
            self.words.append(word)
            handle = (0, SIZE, address, ctypes.addressof(word))
            allocations[address] = SimpleNamespace(
                handle=handle, tag=tags[number % len(tags)], is_asleep=True
            )
        self.allocations = allocations
        self.weights = device.CudaWeights(allocations)
        for region in self.weights.regions():
            self.weights.map(region)
        self.trail()

    def trail(self) -> list[str]:
        out = ctypes.create_string_buffer(1 << 16)
        self.fake.fake_trail(out, ctypes.c_size_t(len(out)))
        return out.value.decode().split()

    def live(self) -> int:
        return int(self.fake.fake_physical()) - self.physical


def test_cuda_form_has_only_the_weights_of_vllms_allocator() -> None:
    driver = Driver(2, ("weights", "kv_cache"))
    (region,) = driver.weights.regions()
    assert driver.allocations[region.address].tag == "weights"


def test_exported_memory_outlives_the_process_that_allocated_it() -> None:
    fake, (ours, theirs) = fake_cuda(), socket.socketpair()
    before, memory = fake.fake_physical(), device.ExportableMemory()
    if (child := os.fork()) == 0:
        try:
            region, handle = memory.allocate(3 << 20)
            ctypes.memset(region.address, 5, region.size)
            socket.send_fds(theirs, [b"%d" % region.size], [memory.export(handle)])
            signal.pause()
        finally:
            os._exit(1)
    theirs.close()
    size, (descriptor,), *_ = socket.recv_fds(ours, 9, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mapped = memory.map_descriptor(descriptor, int(size))
    os.close(descriptor)
    assert mapped.size == 4 << 20 and ctypes.string_at(mapped.address, mapped.size) == b"\5" * mapped.size
    memory.unmap(mapped)
    assert fake.fake_physical() == before


def test_failed_call_leaves_no_exportable_memory() -> None:
    fake, memory = fake_cuda(), device.ExportableMemory()
    region, handle = memory.allocate(SIZE)
    descriptor, before = memory.export(handle), fake.fake_physical()
    attempts = {"allocate": (SIZE,), "map_descriptor": (descriptor, region.size)}
    for name, arguments in attempts.items():
        for number in (1, 2, 3):
            fake.fake_fail_at(number, 0)
            with pytest.raises(DriverError):
                getattr(memory, name)(*arguments)
            assert fake.fake_physical() == before
    os.close(descriptor)
