"""What the loader of this process did, for whoever asks afterwards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback


@dataclass
class LoadReport:
    """One load: `way` is prefetcher, files or vllm (the last rung that was taken), `bytes` what was handed over.

    `in_place_bytes` of them became parameters without a copy. `wait_s` are the seconds spent waiting for bytes, `seconds`
    those of the whole load. `fetch` is the prefetcher's account, {} without one; `fallbacks` name each step down.
    """

    way: str = ""
    tensors: int = 0
    bytes: int = 0
    in_place_bytes: int = 0
    wait_s: float = 0.0
    seconds: float = 0.0
    fetch: dict[str, Any] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)

    def step_down(self, reason: str) -> None:
        """Note why the next rung is taken."""
        self.fallbacks.append(Fallback("load", reason))

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"fallbacks": fallback.to_json(self.fallbacks)}


_last: list[LoadReport] = []


def begin() -> LoadReport:
    """A new report, from now on the latest."""
    _last[:] = [LoadReport()]
    return _last[0]


def document() -> dict[str, Any]:
    """This process's latest load as plain data, {} when it was not done by the format `coldstart`."""
    return _last[0].document() if _last else {}
