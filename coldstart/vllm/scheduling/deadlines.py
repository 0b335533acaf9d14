"""Deadlines and shadow predictions in vLLM's API server process; the engine and its scheduler are unchanged.

The deadline of a request is passed to vLLM's own scheduler as its priority. Predictions run in a vLLM statistics logger.
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

from coldstart.scheduling.classes import RequestClasses
from coldstart.scheduling.settings import DEADLINE, FCFS, SchedulerSettings
from coldstart.scheduling.shadow import FinishedRequest, Prediction, QueueSimulator, ShadowPredictor
from coldstart.vllm.scheduling.headers import HEADERS

MAX_CPU_SHARE = 0.01
"""Maximum share of a CPU core for predictions."""

log = logging.getLogger("vllm.coldstart")


class DeadlineLLM(AsyncLLM):
    """vLLM's engine client, extended to assign a deadline to each request. The settings come from --additional-config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        cached = _count_kv_tokens(self.vllm_config) * bool(
            self.vllm_config.cache_config.enable_prefix_caching
        )
        self._deadlines = settings.create_deadline_policy(cached)
        self._classes = RequestClasses(Path(settings.classes)) if settings.classes else None

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, priority: int = 0, **kwargs: Any
    ) -> Any:
        """Add a request with its deadline as its priority.

        A priority that is set by the client or by the request class takes precedence over deadlines.
        """
        if not priority and self._classes is not None:
            priority = self._classes.find_priority(HEADERS.get())
        deadline = self._deadlines.priority(time.time(), _get_token_ids(prompt), priority)
        return await super().add_request(request_id, prompt, params, *args, priority=deadline, **kwargs)


class ShadowLogger(StatLoggerBase):
    """Statistics logger that predicts the request latencies of one engine under the other policy (FCFS or deadlines)."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = SchedulerSettings.from_additional_config(vllm_config.additional_config)
        limits = vllm_config.scheduler_config
        model = QueueSimulator(
            settings.get_iteration_profile(),
            limits.max_num_active_seqs or limits.max_num_seqs,
            limits.max_num_batched_tokens,
            _count_kv_tokens(vllm_config),
        )
        serves_deadlines = settings.policy == DEADLINE
        compute_slack_s = settings.create_deadline_policy(0).compute_slack_s
        self._shadow = ShadowPredictor(model, compute_slack_s, serves_deadlines=serves_deadlines)
        self._current_and_other_order = (DEADLINE, FCFS) if serves_deadlines else (FCFS, DEADLINE)
        self._engine, self._interval_s = str(engine_index), settings.shadow_s or 0.0
        self._due_s = time.monotonic() + self._interval_s

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Record the finished requests, and start a prediction in a separate thread when it is due."""
        if iteration_stats is None or not iteration_stats.finished_requests:
            return
        for one in iteration_stats.finished_requests:
            # vLLM gives no decode time to a request that was aborted before its first token.
            if one.num_generation_tokens:
                tokens = one.num_prompt_tokens, one.num_cached_tokens, one.num_generation_tokens
                arrival_s = iteration_stats.iteration_timestamp - one.e2e_latency
                self._shadow.add(FinishedRequest(arrival_s, *tokens, one.e2e_latency - one.decode_time))
        if time.monotonic() >= self._due_s:
            self._due_s = float("inf")
            Thread(target=self.predict_and_publish, name="shadow", daemon=True).start()

    def predict_and_publish(self) -> None:
        """Predict the latencies and publish them. Delay the next prediction to use at most MAX_CPU_SHARE of a CPU core."""
        started_cpu_s = time.thread_time()
        if prediction := self._shadow.predict():
            self._publish(prediction)
        self._due_s = time.monotonic() + max(
            self._interval_s, (time.thread_time() - started_cpu_s) / MAX_CPU_SHARE
        )

    def log_engine_initialized(self) -> None:
        """Do nothing, because no request has finished."""

    def _publish(self, prediction: Prediction) -> None:
        own, other = self._current_and_other_order
        log.info(
            "coldstart: shadow: predicted, not measured: --scheduler %s instead of %s would change the mean time to first token"
            " by %.2fx and the latency of the tenth with the longest outputs by %.2fx (above 1 is faster; last %d requests; the"
            " model's time to first token is %.2f times the measured one)",
            other, own, prediction.ttft_gain, prediction.longest_gain, prediction.requests, prediction.model_ratio,
        )  # fmt: skip
        for name, gauge in _gauges().items():
            gauge.labels(engine=self._engine, order=other).set(getattr(prediction, name))


@cache
def _gauges() -> dict[str, Gauge]:
    """Return the gauges by field of Prediction. They are created once, because Prometheus rejects duplicate names."""
    about = {
        "ttft_gain": "Predicted gain of another order: mean time to first token in the current order over that in the other.",
        "longest_gain": "Predicted gain of another order: mean latency of the tenth of requests with the longest outputs.",
        "model_ratio": "Mean time to first token replayed by the prediction model over the measured one.",
    }
    return {
        name: Gauge(f"coldstart_shadow_{name}", text, ("engine", "order"), multiprocess_mode="mostrecent")
        for name, text in about.items()
    }


def _count_kv_tokens(config: Any) -> int:
    cache_config = config.cache_config
    tokens: int = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
    return tokens


def _get_token_ids(prompt: Any) -> Sequence[int]:
    """Return the token IDs of a prompt, or none for other prompts, whose deadlines are then close to their arrival."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return tokens if tokens is not None else getattr(prompt, "prompt_token_ids", None) or ()
