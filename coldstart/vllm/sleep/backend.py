"""Sleep backend `coldstart` for vLLM, which copies the weights to host memory only once.

At level 1, the first sleep copies the weights to an arena; later sleeps only unmap them as long as their digests stay the
same. At level 2, the weights are dropped, and vLLM's caller loads them again. vLLM's own backend handles all other
memory.

Invariant: after `resume`, each weight has the digest that it had before `suspend`, or all weights were loaded again and
`fallbacks` contains the reason.
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
    MemoryFileWeights,
    WeightsDevice,
    free_tensor_pages,
)
from coldstart.vllm.sleep.memory import Arena, ArenaPool, ArenaSpaceError


class ColdstartBackend(CuMemBackend):
    """Sleep backend of one engine. Before `bind_model` is called, it behaves like vLLM's own backend."""

    def __init__(self, arenas: ArenaPool | None = None) -> None:
        super().__init__()
        self.fallbacks: list[Fallback] = []
        self._arenas = arenas
        self._device: WeightsDevice | None = None
        self._arena: Arena | None = None
        self._why, self._digests = "the weights were never copied", dict[str, str]()
        self._buffers: dict[str, torch.Tensor] = {}
        self._lost, self._is_discarded = set[Region](), False

    @classmethod
    def is_supported(cls) -> bool:
        """Return whether this process runs on the CPU or has the CUDA driver bindings."""
        if current_platform.is_cpu():
            return True
        try:
            return current_platform.is_cuda() and bool(bindings())
        except DriverError:
            return False

    def bind_model(
        self,
        model: Any,
        name: str,
        device: WeightsDevice,
        reload: Callable[[], None],
        list_kv_caches: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """Manage the weights of `model` on `device`. Messages refer to the model as `name`.

        `reload` loads the weights again in place. `list_kv_caches` returns the KV cache tensors of a CPU engine.
        """
        self._model, self._name, self._device = model, name, device
        self._reload, self._cache = reload, list_kv_caches

    def suspend(self, level: int = 1) -> None:
        """Unmap the weights, after copying them to the arena at level 1. Suspend all other memory as vLLM does."""
        self._state = "SUSPENDED"
        if (device := self._device) is not None:
            if self._lost:
                pass  # an earlier call was interrupted: arena and digests are still valid
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
        """Map the weights, and copy them back or reload them. Resume all other memory as vLLM does."""
        self._state = "RESUMING"
        if (device := self._device) is not None and (tags is None or WEIGHTS in tags):
            for region in device.regions():
                if not device.is_mapped(region):
                    device.map(region)
            if self._lost and not self._is_discarded and (reason := self._restore(device)) is not None:
                self.fallbacks.append(Fallback(STAGE, f"{reason}; the weights were loaded again"))
                self._drop()
                self._resume_rest([WEIGHTS])  # loading may need other memory, but not the KV cache
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
            free_tensor_pages(self._cache())

    def _resume_rest(self, tags: list[str] | None) -> None:
        if not current_platform.is_cpu():
            super().resume(tags)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _measure(self, device: WeightsDevice) -> dict[str, str]:
        return {name: device.digest(tensor) for name, tensor in self._tensors()}

    def _keep(self, device: WeightsDevice) -> None:
        """Copy the weights to the arena unless it already contains them."""
        found = self._measure(device)
        if self._arena is not None:
            different = [name for name in found if found[name] != self._digests.get(name)]
            with self._arena.protect() as evicted:
                if not different and evicted is None:
                    return
            if different:
                reason = f"{different[0]} has changed since the last sleep; the weights were copied again"
                self.fallbacks.append(Fallback(STAGE, reason))
            self._drop()
        self._digests, regions = found, device.regions()
        try:
            arena = (self._arenas or ArenaPool.open_shared()).create_arena(
                self._name, sum(one.size for one in regions)
            )
        except ArenaSpaceError as error:
            self._why = str(error)
            return
        try:
            self._pin(device, arena)
            with arena.protect():
                for region, at in _place(regions, arena.address):
                    device.read(region, at)
                device.synchronize()
        except BaseException:
            arena.close()
            raise
        self._arena = arena

    def _pin(self, device: WeightsDevice, arena: Arena) -> None:
        try:
            if device.pin(arena.address, arena.size):
                arena.call_on_eviction(lambda: device.unpin(arena.address))
        except DriverError as error:  # the driver also copies memory that is not pinned
            reason = f"the copy of the weights is not pinned, which slows each wake-up: {error}"
            self.fallbacks.append(Fallback(STAGE, reason))

    def _restore(self, device: WeightsDevice) -> str | None:
        """Copy the weights from the arena. Return the reason if they differ from those before the sleep, else None."""
        if self._arena is None:
            return self._why
        with self._arena.protect() as reason:
            if reason is not None:
                return f"the copy of the weights was evicted: {reason}"
            for region, at in _place(device.regions(), self._arena.address):
                device.write(region, at)
            device.synchronize()
        wrong = [name for name, digest in self._measure(device).items() if digest != self._digests[name]]
        return f"the copy of {wrong[0]} does not match its digest" if wrong else None

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
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    def coldstart_bind_weights_to_sleep(self, model_name: str) -> str | None:
        """Make the sleep backend manage the weights of this worker. Return the reason if it cannot, else None."""
        worker: Any = self
        if worker.vllm_config.speculative_config is not None:
            return "vLLM cannot reload the weights of a draft model separately"
        if not isinstance(backend := worker.sleep_mode_backend, ColdstartBackend):
            return f"vLLM selected another sleep backend, {type(backend).__name__}"
        model = worker.model_runner.get_model()
        device: WeightsDevice
        if current_platform.is_cpu():
            device = MemoryFileWeights()
            # Exclude buffers: the models of a process share those of rotary embeddings.
            device.move_tensors(model.parameters())
        else:
            device = CudaWeights(get_mem_allocator_instance().pointer_to_data, torch.cuda.current_device())
        backend.bind_model(
            model, model_name, device, worker.reload_weights, lambda: worker.model_runner.kv_caches
        )
        return None

    def coldstart_take_sleep_fallbacks(self) -> list[str]:
        """Return the reasons of the fallbacks since the last call."""
        worker: Any = self
        taken, worker.sleep_mode_backend.fallbacks = worker.sleep_mode_backend.fallbacks, []
        return [one.reason for one in taken]


def register() -> None:
    """Register the backend with vLLM, once in each process."""
    with suppress(ValueError):  # already registered
        SleepModeBackendFactory.register_backend(NAME, __name__, ColdstartBackend.__name__)


register()  # in each process that imports the extension
