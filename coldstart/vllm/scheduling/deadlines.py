"""Deadlines and shadow in the process of vLLM's API server; its engine and its scheduler are unchanged.

Requests carry their deadline as the priority of vLLM's own scheduler. The shadow is one of vLLM's statistics loggers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from prometheus_client import Gauge
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from coldstart.scheduling.classes import Classes
from coldstart.scheduling.settings import DEADLINE, FCFS, SchedulerSettings
from coldstart.scheduling.shadow import Answered, Prediction, QueueModel, Shadow
from coldstart.vllm.scheduling.headers import HEADERS

MOST_CPU = 0.01
"""Share of a core that predictions may take."""

log = logging.getLogger("vllm.coldstart")


class DeadlineLLM(AsyncLLM):
    """vLLM's engine client; the settings are those of --additional-config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SchedulerSettings.read(self.vllm_config.additional_config)
        cached = _kv_tokens(self.vllm_config) * bool(self.vllm_config.cache_config.enable_prefix_caching)
        self._deadlines = settings.deadlines(cached)
        self._classes = Classes(Path(settings.classes)) if settings.classes else None

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, priority: int = 0, **kwargs: Any
    ) -> Any:
        """Add a request as vLLM does. A client's own priority, or that of its class, comes before the deadline."""
        if not priority and self._classes is not None:
            priority = self._classes.find(HEADERS.get())
        deadline = self._deadlines.priority(time.time(), _tokens(prompt), priority)
        return await super().add_request(request_id, prompt, params, *args, priority=deadline, **kwargs)


class ShadowLogger(StatLoggerBase):
    """Reports in the log and in /metrics what the other order would do to the requests of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = SchedulerSettings.read(vllm_config.additional_config)
        limits = vllm_config.scheduler_config
        model = QueueModel(
            settings.iteration_profile(),
            limits.max_num_active_seqs or limits.max_num_seqs,
            limits.max_num_batched_tokens,
            _kv_tokens(vllm_config),
        )
        serves_deadlines = settings.policy == DEADLINE
        self._shadow = Shadow(model, settings.deadlines(0).slack_s, serves_deadlines=serves_deadlines)
        self._orders = (DEADLINE, FCFS) if serves_deadlines else (FCFS, DEADLINE)
        self._engine, self._every_s = str(engine_index), settings.shadow_s or 0.0
        self._due_s = time.monotonic() + self._every_s

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Note the requests that have ended; predict in a thread of its own if it is time."""
        if iteration_stats is None or not iteration_stats.finished_requests:
            return
        for one in iteration_stats.finished_requests:
            # vLLM gives no decode time to a request that was aborted before its first token.
            if one.num_generation_tokens:
                tokens = one.num_prompt_tokens, one.num_cached_tokens, one.num_generation_tokens
                arrival_s = iteration_stats.iteration_timestamp - one.e2e_latency
                self._shadow.add(Answered(arrival_s, *tokens, one.e2e_latency - one.decode_time))
        if time.monotonic() >= self._due_s:
            self._due_s = float("inf")
            Thread(target=self.report, name="shadow", daemon=True).start()

    def report(self) -> None:
        """Predict and publish; the next prediction waits until this one has taken at most MOST_CPU of the time."""
        began_s = time.thread_time()
        if found := self._shadow.predict():
            self._publish(found)
        self._due_s = time.monotonic() + max(self._every_s, (time.thread_time() - began_s) / MOST_CPU)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to predict yet."""

    def _publish(self, found: Prediction) -> None:
        own, other = self._orders
        log.info(
            "coldstart: shadow: predicted, not measured: --scheduler %s instead of %s would change the mean time to first token"
            " by %.2fx and the latency of the tenth with the longest outputs by %.2fx (above 1 is faster; last %d requests; the"
            " model's time to first token is %.2f times the measured one)",
            other, own, found.ttft_gain, found.longest_gain, found.requests, found.model_ratio,
        )  # fmt: skip
        for name, gauge in _gauges().items():
            gauge.labels(engine=self._engine, order=other).set(getattr(found, name))


@cache
def _gauges() -> dict[str, Gauge]:
    """Return the gauges by member of a prediction; the registry takes each name once for all engines."""
    about = {
        "ttft_gain": "Predicted gain of another order: mean time to first token of this order over that of the other one.",
        "longest_gain": "Predicted gain of another order for the latency of the tenth with the longest outputs.",
        "model_ratio": "Time to first token of the model of predictions over the measured one.",
    }
    return {
        name: Gauge(f"coldstart_shadow_{name}", text, ("engine", "order"), multiprocess_mode="mostrecent")
        for name, text in about.items()
    }


def _kv_tokens(config: Any) -> int:
    cache_config = config.cache_config
    tokens: int = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
    return tokens


def _tokens(prompt: Any) -> Sequence[int]:
    """Return the tokens of a rendered prompt; none for a prompt of another kind, whose deadline is close to its arrival."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return tokens if tokens is not None else getattr(prompt, "prompt_token_ids", None) or ()
