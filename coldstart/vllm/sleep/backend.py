"""vLLM's sleep-mode backend `coldstart`: weights are copied to host memory once, and then only unmapped and copied back.

Level 1 keeps the weights in an arena that is filled at the first sleep and kept as long as the weights have the same digests.
Level 2 drops them, and vLLM's caller loads them again. What vLLM's own backend does with all other memory is unchanged.

Invariant: after `resume` each weight has the digest that it had before `suspend`, or all were loaded again and `fallbacks`
has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
from vllm.platforms import current_platform

from coldstart.contract.fallback import Fallback
from coldstart.graphs.cuda.driver import bindings
from coldstart.graphs.errors import DriverError
from coldstart.system.proc.mappings import Region
from coldstart.vllm.sleep import NAME, STAGE
from coldstart.vllm.sleep.device import (
    WEIGHTS,
    CudaWeights,
    Device,
    MemoryFileDevice,
    MemoryFileWeights,
    drop_pages,
)
from coldstart.vllm.sleep.memory import Arena, Arenas, NoRoomError

MEMORY_FILES = MemoryFileDevice()
"""Memory that takes the place of a device in a process without one."""


class ColdstartBackend(CuMemBackend):
    """Backend of one engine. Without `bind` it is vLLM's own."""

    def __init__(self, arenas: Arenas | None = None) -> None:
        super().__init__()
        self.fallbacks: list[Fallback] = []
        self._arenas = arenas
        self._device: Device | None = None
        self._arena: Arena | None = None
        self._why, self._digests = "the weights were never copied", dict[str, str]()
        self._buffers: dict[str, torch.Tensor] = {}
        self._lost, self._is_discarded = set[Region](), False

    @classmethod
    def is_supported(cls) -> bool:
        """Return whether this process has the driver's bindings, or needs none."""
        if current_platform.is_cpu():
            return True
        try:
            return current_platform.is_cuda() and bool(bindings())
        except DriverError:
            return False

    def bind(
        self,
        model: Any,
        name: str,
        device: Device,
        reload: Callable[[], None],
        cache: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """Manage the weights of `model` on `device`.

        `reload` loads them again in place. `cache` returns the tensors of the KV cache of a CPU engine.
        """
        self._model, self._name, self._device = model, name, device
        self._reload, self._cache = reload, cache

    def suspend(self, level: int = 1) -> None:
        """Unmap the weights, after a copy at level 1, and all else as vLLM does."""
        self._state = "SUSPENDED"
        if (device := self._device) is not None:
            if self._lost:
                pass  # a suspend or a resume was interrupted: the arena and the digests are those before it
            elif level == 1:
                self._keep(device)
            else:
                self._drop()
            self._is_discarded = level != 1
            if not self._lost:
                self._buffers = {name: one.cpu().clone() for name, one in self._model.named_buffers()}
            for region in device.regions():
                if device.is_mapped(region):
                    self._lost.add(region)
                    device.unmap(region)
        self._suspend_rest(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the weights and copy them back, or load them again; all else as vLLM does."""
        self._state = "RESUMING"
        if (device := self._device) is not None and (tags is None or WEIGHTS in tags):
            for region in device.regions():
                if not device.is_mapped(region):
                    device.map(region)
            if self._lost and not self._is_discarded and (reason := self._restore(device)) is not None:
                self.fallbacks.append(Fallback(STAGE, f"{reason}; the weights were loaded again"))
                self._drop()
                self._resume_rest([WEIGHTS])  # loading may need other memory than the KV cache
                self._reload()
                self._restore_buffers()
            elif self._is_discarded:
                self._restore_buffers()
            self._lost.clear()
        self._resume_rest(tags)
        self._state = "RUNNING"

    def _suspend_rest(self, level: int) -> None:
        if not current_platform.is_cpu():
            super().suspend(level)
        elif self._device is not None:
            drop_pages(self._cache())

    def _resume_rest(self, tags: list[str] | None) -> None:
        if not current_platform.is_cpu():
            super().resume(tags)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _measure(self, device: Device) -> dict[str, str]:
        return {name: device.digest(tensor) for name, tensor in self._tensors()}

    def _keep(self, device: Device) -> None:
        """Fill the arena, unless it has these weights already."""
        found = self._measure(device)
        if self._arena is not None:
            different = [name for name in found if found[name] != self._digests.get(name)]
            with self._arena.used() as evicted:
                if not different and evicted is None:
                    return
            if different:
                reason = f"{different[0]} was changed since the last sleep; the weights were copied again"
                self.fallbacks.append(Fallback(STAGE, reason))
            self._drop()
        self._digests, regions = found, device.regions()
        try:
            arena = (self._arenas or Arenas.shared()).create(self._name, sum(one.size for one in regions))
        except NoRoomError as error:
            self._why = str(error)
            return
        try:
            if device.pin(arena.address, arena.size):
                arena.watch(lambda: device.unpin(arena.address))
            with arena.used():
                for region, at in _place(regions, arena.address):
                    device.read(region, at)
                device.synchronize()
        except BaseException:
            arena.close()
            raise
        self._arena = arena

    def _restore(self, device: Device) -> str | None:
        """Copy the weights from the arena. Return why they are not what they were, or None."""
        if self._arena is None:
            return self._why
        with self._arena.used() as reason:
            if reason is not None:
                return f"the copy of the weights was evicted: {reason}"
            for region, at in _place(device.regions(), self._arena.address):
                device.write(region, at)
            device.synchronize()
        wrong = [name for name, digest in self._measure(device).items() if digest != self._digests[name]]
        return f"the copy of {wrong[0]} is not this model's" if wrong else None

    def _restore_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.data.copy_(self._buffers[name])

    def _drop(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena, self._why = None, "the weights were never copied"


def _place(regions: list[Region], address: int) -> Iterator[tuple[Region, int]]:
    for region in regions:
        yield region, address
        address += region.size


class SleepExtension:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    def coldstart_keep_weights(self, name: str) -> str | None:
        """Have the sleep backend manage this worker's weights. Return why it cannot, or None."""
        worker: Any = self
        if worker.vllm_config.speculative_config is not None:
            return "a draft model has weights that cannot be loaded again alone"
        if not isinstance(backend := worker.sleep_mode_backend, ColdstartBackend):
            return f"vLLM chose the backend {type(backend).__name__}"
        model = worker.model_runner.get_model()
        device: Device
        if current_platform.is_cpu():
            device = MemoryFileWeights(MEMORY_FILES)
            # Not the buffers: vLLM shares those of rotary embeddings among the models of a process.
            device.adopt(model.parameters())
        else:
            device = CudaWeights(get_mem_allocator_instance().pointer_to_data, torch.cuda.current_device())
        backend.bind(model, name, device, worker.reload_weights, lambda: worker.model_runner.kv_caches)
        return None

    def coldstart_take_sleep_fallbacks(self) -> list[str]:
        """Return the reasons of the fallbacks since the last call."""
        worker: Any = self
        taken, worker.sleep_mode_backend.fallbacks = worker.sleep_mode_backend.fallbacks, []
        return [one.reason for one in taken]


def register() -> None:
    """Register the backend with vLLM, once for each process."""
    with suppress(ValueError):  # it is registered
        SleepModeBackendFactory.register_backend(NAME, __name__, ColdstartBackend.__name__)


register()  # in each process that imports the extension
