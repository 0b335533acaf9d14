"""Load tensors from the first source that works, and fall back to the next when a source fails.

Invariant: each wanted tensor is yielded exactly once, and the report has one entry for each fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.models.checkpoint_files import Tensor
from coldstart.system import timeline
from coldstart.system.start_progress import BYTES, ProgressCounter
from coldstart.weights.load.tensor_sources import SourceLostError, TensorSource

STAGE = "load weights"
before_fetched: Callable[[Any], None] | None = None
"""Function of the worker that the loader calls with the model before it waits for weights that are being fetched."""
# Name of a source, and the function that opens it for the remaining tensors.
Rung = tuple[str, Callable[[Sequence[Tensor]], TensorSource]]


@dataclass
class LoadReport:
    """Report of one load of weights.

    `way` is the last source used (prefetcher, files or vllm), and `bytes` is the number of bytes loaded. `wait_s` is the
    time in seconds that the loader waited for bytes, and `seconds` is the time of the whole load. `fetch` has the
    prefetcher's statistics ({} without a prefetcher), and `fallbacks` has one entry for each failed source.
    """

    way: str = ""
    tensors: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    seconds: float = 0.0
    fetch: dict[str, Any] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)

    def add_fallback(self, reason: str) -> None:
        """Record the reason for a fallback to the next source."""
        self.fallbacks.append(Fallback("load", reason))

    def document(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self) | {"fallbacks": fallback.encode(self.fallbacks)}


_last: list[LoadReport] = []


def begin_report() -> LoadReport:
    """Start a new report, which `describe_last_load` then returns."""
    _last[:] = [LoadReport()]
    return _last[0]


def describe_last_load() -> dict[str, Any]:
    """Return the latest report as JSON data, or {} if this process did not use the load format `coldstart`."""
    return _last[0].document() if _last else {}


class NoLoaderLeftError(RuntimeError):
    """Error after every source of weights has failed. `left` contains the tensors that were not loaded."""

    def __init__(self, left: Sequence[Tensor], reason: str) -> None:
        super().__init__(reason)
        self.left = list(left)


def load_tensors(
    tensors: Sequence[Tensor], rungs: Sequence[Rung], report: LoadReport
) -> Iterator[tuple[Tensor, memoryview]]:
    """Yield each tensor with its bytes. After a fallback, continue with the tensor at which the source failed.

    Args:
        tensors: Tensors to load, in load order, which a source may change.
        rungs: Sources in order of preference.
        report: Report of this load, updated for each tensor and fallback.

    Raises:
        NoLoaderLeftError: The last source failed.
    """
    tensors = list(tensors)
    counter = ProgressCounter(STAGE, sum(tensor.size for tensor in tensors), BYTES)
    done, reason = 0, "neither a prefetcher nor a file with the weights is available"
    for way, opened in rungs:
        report.way = way
        try:
            source = opened(tensors[done:])
        except SourceLostError as error:
            reason = f"{way}: {error}"
            report.add_fallback(reason)
            continue
        tensors[done:] = source.sort_tensors(tensors[done:])
        try:
            while done < len(tensors):
                view = _timed(source, tensors[done], report)
                counter.report_done(report.bytes)
                yield tensors[done], view
                done += 1
            report.fetch = source.get_fetch_stats()
            return
        except SourceLostError as error:
            reason = f"{way} failed after {done} of {len(tensors)} tensors: {error}"
            report.add_fallback(reason)
        finally:
            source.close()
    raise NoLoaderLeftError(tensors[done:], reason)


def _timed(source: TensorSource, tensor: Tensor, report: LoadReport) -> memoryview:
    began = timeline.now()
    view = source.get_bytes(tensor)
    report.wait_s += timeline.now() - began
    report.tensors += 1
    report.bytes += tensor.size
    return view
