"""Tensors from the best source that still gives them: each step down continues where the one before stopped.

Invariant: every wanted tensor is handed over exactly once, in order, and every step down is in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coldstart.system import timeline
from coldstart.weights.load.report import LoadReport
from coldstart.weights.load.tensor_sources import SourceLostError, TensorSource
from coldstart.weights.load.tensors import Tensor

# A rung's name, and what opens it for the tensors that are left.
Rung = tuple[str, Callable[[Sequence[Tensor]], TensorSource]]


class NoLoaderLeftError(RuntimeError):
    """No rung is left. `left` are the tensors that nobody gave."""

    def __init__(self, left: Sequence[Tensor], reason: str) -> None:
        super().__init__(reason)
        self.left = list(left)


def climb_down(
    tensors: Sequence[Tensor], rungs: Sequence[Rung], report: LoadReport
) -> Iterator[tuple[Tensor, memoryview]]:
    """Each tensor with its bytes. Raises Exhausted when the last rung fails."""
    done, reason = 0, "there is neither a prefetcher nor a file to load from"
    for way, opened in rungs:
        report.way = way
        try:
            source = opened(tensors[done:])
        except SourceLostError as error:
            reason = f"{way}: {error}"
            report.step_down(reason)
            continue
        try:
            while done < len(tensors):
                view = _timed(source, tensors[done], report)
                yield tensors[done], view
                done += 1
            report.fetch = source.fetched()
            return
        except SourceLostError as error:
            reason = f"{way}, after {done} of {len(tensors)} tensors: {error}"
            report.step_down(reason)
        finally:
            source.close()
    raise NoLoaderLeftError(tensors[done:], reason)


def _timed(source: TensorSource, tensor: Tensor, report: LoadReport) -> memoryview:
    began = timeline.now()
    view = source.bytes_of(tensor)
    report.wait_s += timeline.now() - began
    report.tensors += 1
    report.bytes += tensor.size
    return view
