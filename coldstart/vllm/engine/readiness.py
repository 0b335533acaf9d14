"""The server's own word that it is ready: it listens, and one real token came back.

Invariant: restored state that answers its canary wrongly never answers a client, because the token is generated before the
server listens. The word is one line of JSON on a pipe: what was restored, and what was not.
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

from coldstart.contract.graphs import GRAPHS_REPORT, RESTORE
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.machine import timeline

FALLBACK_PROMPT = [1, 2, 3, 4]


class Readiness:
    """Acknowledges to whoever started the server: once, after it listens and one real token came back."""

    def __init__(self, plan: LaunchPlan, engine: Any, worker_reports: bool) -> None:
        self.plan, self.engine, self.worker_reports = plan, engine, worker_reports
        self.descriptor = int(os.environ.pop(READY_FD_ENV, "-1"))
        self.tokens: list[int] = []
        self.began = timeline.now()
        self.done = False

    async def proven(self) -> bool:
        """Generate the canary's first token; False, after saying so to the starter, when it is another one.

        Asked before the server listens: restored state that answers wrongly never answers a client.
        """
        self.tokens = await self._first_token()
        self.began = timeline.now()
        if self._canary() is not False:
            return True
        await self._acknowledge()
        return False

    async def listening(self) -> None:
        """Called by uvicorn once it accepts connections (and later from time to time)."""
        if self.done:
            return
        timeline.emit("build app", self.began, timeline.now(), track="server")
        await self._acknowledge()
        gc.enable()

    async def _acknowledge(self) -> None:
        self.done = True
        report = await self._report()
        if self.descriptor >= 0:
            os.write(self.descriptor, (json.dumps(report) + "\n").encode())
            os.close(self.descriptor)

    def _canary(self) -> bool | None:
        known = self.plan.canary
        return self.tokens == known["tokens"][: len(self.tokens)] if known and self.tokens else None

    async def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "fast_path": {"worker": False} if self._without_worker() else {},
            "fallbacks": list(self.plan.fallbacks),
            "tokens": self.tokens,
            "canary": self._canary(),
        }
        if self.worker_reports:
            for worker in await self.engine.collective_rpc("coldstart_report"):
                for name, taken in worker["fast_path"].items():
                    report["fast_path"][name] = taken and report["fast_path"].get(name, True)
                report["fallbacks"] += worker["fallbacks"]
                report.setdefault("loads", []).append(worker["load"])
        if RESTORE in self.plan.env:
            fallbacks = await graph_fallbacks(self.engine)
            report["fast_path"]["graphs"] = not fallbacks
            report["fallbacks"] += fallbacks
        return report

    def _without_worker(self) -> bool:
        """Whether this vLLM has no way for our worker, which then cannot say so itself."""
        return any(fallback["section"] == "worker" for fallback in self.plan.fallbacks)

    async def _first_token(self) -> list[int]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if "generate" not in await self.engine.get_supported_tasks():
            return []
        canary = self.plan.canary or {"prompt": FALLBACK_PROMPT}
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        start, tokens = timeline.now(), []
        async for output in self.engine.generate(
            TokensPrompt(prompt_token_ids=canary["prompt"]), params, "coldstart"
        ):
            tokens = list(output.outputs[0].token_ids)
        timeline.emit("first token", start, timeline.now(), track="server")
        return tokens


async def graph_fallbacks(engine: Any) -> list[dict[str, str]]:
    """Which CUDA graphs the workers have captured although the bundle has them, or why they restored none."""
    try:
        workers = await engine.collective_rpc(GRAPHS_REPORT)
    except Exception as error:  # noqa: BLE001 - the plug-in is not there, whatever vLLM makes of that
        return [{"section": "graphs", "reason": f"the plug-in did not load: {error}"}]
    found = {f"{'all' if k == '*' else k}: {why}": None for worker in workers for k, why in worker.items()}
    return [{"section": "graphs", "reason": reason} for reason in found]
