"""Additional method for vLLM's own workers (`--worker-extension-cls`) that reports how they loaded their weights."""

from __future__ import annotations

from typing import Any

from coldstart.contract import fallback
from coldstart.vllm import compat
from coldstart.weights.load import report


class Reporting:
    """Mixin for vLLM's worker class with the same report as our own worker."""

    def coldstart_report(self) -> dict[str, Any]:
        """Return a report as ColdWorker.coldstart_report: nothing was restored, and `load` describes the weights."""
        loaded, found = report.document(), compat.fallbacks
        lost = {one.stage: False for one in found}
        return {
            "fast_path": lost,
            "fallbacks": [*fallback.encode(found), *loaded.get("fallbacks", [])],
            "load": loaded,
        }
