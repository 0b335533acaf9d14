"""Tensors onto a CUDA device: through pinned host memory, on several streams, ahead of the model that takes them.

Never run in this project's tests, which have no such device; the CPU path does not come here. The streams of what a request
waits for have the high priority, those of what is loaded in the background the low one (ParaServe, section 5.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle

import torch

STREAMS = 4
FOREGROUND, BACKGROUND = -1, 0

_Copy = tuple[str, torch.Tensor, torch.cuda.Event]


def onto(
    device: torch.device, weights: Iterable[tuple[str, torch.Tensor]], priority: int = FOREGROUND
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` as tensors on `device`, in their order; up to STREAMS copies are under way before the oldest is handed over."""
    streams = cycle([torch.cuda.Stream(device, priority=priority) for _ in range(STREAMS)])
    under_way: deque[_Copy] = deque()
    for name, tensor in weights:
        under_way.append(_begin(name, tensor, device, next(streams)))
        if len(under_way) == STREAMS:
            yield _taken(under_way.popleft(), device)
    while under_way:
        yield _taken(under_way.popleft(), device)


def _begin(name: str, tensor: torch.Tensor, device: torch.device, stream: torch.cuda.Stream) -> _Copy:
    with torch.cuda.stream(stream):
        # The pinned copy is kept by torch's host allocator until the stream has read it.
        copied = tensor.pin_memory().to(device, non_blocking=True)
        return name, copied, stream.record_event()


def _taken(copy: _Copy, device: torch.device) -> tuple[str, torch.Tensor]:
    name, tensor, event = copy
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    tensor.record_stream(current)
    return name, tensor
