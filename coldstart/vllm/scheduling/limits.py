"""Conditions of our scheduler: the version of vLLM, and its configuration."""

from __future__ import annotations

from typing import Any

from coldstart.vllm import compat


class IncompatibleVllmError(RuntimeError):
    """Our scheduler cannot run here; the message has the reason."""


def require(config: Any) -> None:
    """Check a server that was started manually. Raises IncompatibleVllmError if our scheduler cannot run."""
    if reason := compat.check("scheduler") or unsupported(config):
        raise IncompatibleVllmError(f"{reason.removesuffix('.')}; serve with --scheduler fcfs")


def unsupported(config: Any) -> str | None:
    """Return the settings of this configuration that the scheduler does not support, as a sentence, or None."""
    wrong = []
    if config.scheduler_config.policy != "fcfs":
        wrong.append(f"--scheduling-policy {config.scheduler_config.policy} (the queues are replaced)")
    if not config.scheduler_config.enable_chunked_prefill:
        wrong.append("chunked prefill switched off")
    return f"the scheduler does not support {'; '.join(wrong)}." if wrong else None
