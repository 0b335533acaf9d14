"""One more method for vLLM's own workers (`--worker-extension-cls`): how they loaded their weights."""

from __future__ import annotations

from typing import Any

from coldstart.weights.load import report


class Reporting:
    """Mixed into the worker class by vLLM; answers the same call as our own worker."""

    def coldstart_report(self) -> dict[str, Any]:
        """As ColdWorker.coldstart_report: nothing was restored, the weights came as `load` says."""
        loaded = report.document()
        return {"fast_path": {}, "fallbacks": loaded.get("fallbacks", []), "load": loaded}
