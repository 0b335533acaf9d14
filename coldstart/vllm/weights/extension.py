"""One more method for vLLM's own workers (`--worker-extension-cls`): how they loaded their weights."""

from __future__ import annotations

from typing import Any

from coldstart.contract import fallback
from coldstart.vllm import compat
from coldstart.weights.load import report


class Reporting:
    """Mixed into the worker class by vLLM; answers the same call as our own worker."""

    def coldstart_report(self) -> dict[str, Any]:
        """As ColdWorker.coldstart_report: nothing was restored, the weights came as `load` says."""
        loaded, found = report.document(), compat.fallbacks
        lost = {one.stage: False for one in found}
        return {
            "fast_path": lost,
            "fallbacks": [*fallback.to_json(found), *loaded.get("fallbacks", [])],
            "load": loaded,
        }
