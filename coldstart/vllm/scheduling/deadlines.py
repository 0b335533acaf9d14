"""Deadlines in vLLM's API server process, which are passed to vLLM's own scheduler as priorities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from coldstart.scheduling.classes import RequestClasses
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.headers import HEADERS


class DeadlineLLM(AsyncLLM):
    """vLLM's engine client, extended to assign a deadline to each request. The settings come from --additional-config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        cache = self.vllm_config.cache_config
        cached = (cache.num_gpu_blocks or 0) * cache.block_size if cache.enable_prefix_caching else 0
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


def _get_token_ids(prompt: Any) -> Sequence[int]:
    """Return the token IDs of a prompt, or none for other prompts, whose deadlines are then close to their arrival."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return tokens if tokens is not None else getattr(prompt, "prompt_token_ids", None) or ()
