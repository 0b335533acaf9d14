"""Report of the latest load in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback


@dataclass
class LoadReport:
    """Result of one load.

    `way` is the last source used (prefetcher, files or vllm), and `bytes` counts the bytes loaded.
    `wait_s` is the time in seconds that the loader waited for bytes, `seconds` the time of the full load.
    `fetch` has the prefetcher's statistics ({} without a prefetcher), and `fallbacks` has one entry for each
    failed source.
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


def begin() -> LoadReport:
    """Start a new report, which becomes the latest."""
    _last[:] = [LoadReport()]
    return _last[0]


def document() -> dict[str, Any]:
    """Return the latest report as JSON data; {} if this process did not use the load format `coldstart`."""
    return _last[0].document() if _last else {}
