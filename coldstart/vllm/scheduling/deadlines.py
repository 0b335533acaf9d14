"""Engine client whose requests carry their deadline as the priority of vLLM's own scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from coldstart.scheduling import SchedulerSettings


class DeadlineLLM(AsyncLLM):
    """vLLM's engine client; the settings are those of --additional-config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cache = self.vllm_config.cache_config
        tokens = (cache.num_gpu_blocks or 0) * cache.block_size * bool(cache.enable_prefix_caching)
        settings = SchedulerSettings.read(self.vllm_config.additional_config)
        self._deadlines = settings.deadlines(tokens)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, priority: int = 0, **kwargs: Any
    ) -> Any:
        """Add a request as vLLM does. A client's own priority comes before the deadline."""
        deadline = self._deadlines.priority(time.time(), _tokens(prompt), priority)
        return await super().add_request(request_id, prompt, params, *args, priority=deadline, **kwargs)


def _tokens(prompt: Any) -> Sequence[int]:
    """Return the tokens of a rendered prompt; none for a prompt of another kind, whose deadline is close to its arrival."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return tokens if tokens is not None else getattr(prompt, "prompt_token_ids", None) or ()
