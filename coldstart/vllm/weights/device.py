"""Copy tensors to a CUDA device through pinned host memory, on several streams, ahead of the model.

This project's tests never run it, because they have no such device; the CPU does not use it. Copies that a request waits for
use high-priority streams, copies of background loads use low-priority ones (ParaServe, section 5.2).
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
    """Yield `weights` as tensors on `device`, in their order, with up to STREAMS copies in flight."""
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
        # torch's host allocator keeps the pinned copy until the stream has read it.
        copied = tensor.pin_memory().to(device, non_blocking=True)
        return name, copied, stream.record_event()


def _taken(copy: _Copy, device: torch.device) -> tuple[str, torch.Tensor]:
    name, tensor, event = copy
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    tensor.record_stream(current)
    return name, tensor
