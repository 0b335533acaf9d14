"""Copy KV blocks between vLLM's cache, in CPU or GPU memory, and bytes.

The bytes of a block have the logical order of vLLM's cache tensors (heads, tokens, content), whatever their order in memory is.
On a GPU, copies run in a stream of their own, beside the engine's computations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from coldstart.vllm.handover.staging import Data

# Most bytes of device memory that copies use at a time. vLLM's limit on its own memory does not include them.
COPY_BYTES = 32 << 20


class KvBlocks:
    """KV blocks of a rank's layers: `count` blocks in each of the tensors `caches`, whose names include the format of the KV.

    A layer's name is the one in `caches` with the device, shape and type of its blocks, so that servers whose blocks differ
    have no layer in common. Any thread can read and write. Raises ValueError if a tensor is not divided into the blocks,
    and RuntimeError if the elements of its last dimension are not contiguous.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], count: int) -> None:
        self._layers: dict[str, torch.Tensor] = {}
        for name, cache in caches.items():
            if cache.dim() < 2 or cache.shape[0] % count:
                raise ValueError(f"the KV cache of layer {name} is not divided into {count} blocks")
            blocks = cache.unflatten(0, (count, -1))
            shape = "x".join(map(str, blocks.shape[1:]))
            # Backends read some packed types in the order of memory.
            order = f", {cache.stride()[1:]}" if cache.element_size() == 1 else ""
            named = f"{name} ({cache.device.type}, {shape}, {cache.dtype}{order})"
            self._layers[named] = blocks.view(torch.uint8)
        self.layers = tuple(self._layers)
        devices = {cache.device for cache in caches.values()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise ValueError("the KV cache is not in the memory of the CPU or of one GPU")
        (self._device,) = devices
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._iteration: torch.cuda.Event | None = None
        self._copying = threading.Lock()

    def get_block_bytes(self, layer: str) -> int:
        return int(self._layers[layer][0].numel())

    def mark_iteration(self) -> None:
        """Let later copies wait for what this thread, which is the engine's, has ordered on its GPU so far."""
        if self._stream is not None:
            iteration = torch.cuda.Event()
            iteration.record(torch.cuda.current_stream(self._device))
            self._iteration = iteration

    def read(self, layer: str, blocks: Sequence[int]) -> memoryview:
        """Return a copy of the bytes of blocks."""
        cache = self._layers[layer]
        if self._stream is None:
            return memoryview(cache.numpy()[list(blocks)].reshape(-1))
        copied = torch.empty(len(blocks), *cache.shape[1:], dtype=torch.uint8)
        with self._use_stream(self._stream):
            for part in self._divide(layer, blocks):
                copied[part] = cache.index_select(0, self._index(blocks[part])).cpu()
        return memoryview(copied.view(-1).numpy())

    def write(self, layer: str, blocks: Sequence[int], data: Data) -> None:
        """Write the bytes of blocks. They are on the device when this method returns."""
        cache = self._layers[layer]
        values = torch.frombuffer(data, dtype=torch.uint8).view(len(blocks), *cache.shape[1:])
        if self._stream is None:
            cache.numpy()[list(blocks)] = values.numpy()
            return
        # A tensor that was created in inference mode can be changed in this mode only.
        with torch.inference_mode(), self._use_stream(self._stream):
            for part in self._divide(layer, blocks):
                cache[self._index(blocks[part])] = values[part].to(self._device)
            self._stream.synchronize()

    @contextmanager
    def _use_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with self._copying, torch.cuda.stream(stream):
            if self._iteration is not None:
                stream.wait_event(self._iteration)
            yield

    def _divide(self, layer: str, blocks: Sequence[int]) -> Iterator[slice]:
        step = max(1, COPY_BYTES // self.get_block_bytes(layer))
        return (slice(begin, begin + step) for begin in range(0, len(blocks), step))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self._device)
