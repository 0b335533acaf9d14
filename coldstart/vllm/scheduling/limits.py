"""What our scheduler cannot run on: this vLLM, or this configuration of it."""

from __future__ import annotations

from typing import Any

from coldstart.vllm import compat


class IncompatibleVllmError(RuntimeError):
    """Our scheduler cannot run here; the message says why."""


def require(config: Any) -> None:
    """For a server that was started by hand. Raises IncompatibleVllmError where our scheduler cannot run."""
    if reason := compat.check("scheduler") or unsupported(config):
        raise IncompatibleVllmError(f"{reason} Serve with --scheduler fcfs.")


def unsupported(config: Any) -> str | None:
    """What in this configuration the scheduler cannot drive, as a sentence."""
    wrong = []
    if config.scheduler_config.policy != "fcfs":
        wrong.append(f"--scheduling-policy {config.scheduler_config.policy} (the queues are replaced)")
    if not config.scheduler_config.enable_chunked_prefill:
        wrong.append("chunked prefill switched off")
    return f"the scheduler cannot drive {'; '.join(wrong)}." if wrong else None
