"""What our scheduler cannot run on: this vLLM, or this configuration of it."""

from __future__ import annotations

from typing import Any

from coldstart.scheduling.settings import EXPRESS
from coldstart.vllm import compat
from coldstart.vllm.scheduling import LANE_CLS, SCHEDULER_CLS


class IncompatibleVllm(RuntimeError):
    """Our scheduler cannot run here; the message says why."""


def require(config: Any) -> None:
    """For a server that was started by hand. Raises IncompatibleVllm where our scheduler cannot run."""
    if reason := compat.check("scheduler") or unsupported(config):
        raise IncompatibleVllm(f"{reason} Serve with --scheduler fcfs.")


def require_policy(policy: str, *, express: bool) -> None:
    """Raises IncompatibleVllm for a policy that the other class drives."""
    if (policy == EXPRESS) != express:
        right = LANE_CLS if policy == EXPRESS else SCHEDULER_CLS
        raise IncompatibleVllm(f"{policy} is driven by --scheduler-cls {right}.")


def unsupported(config: Any) -> str | None:
    """What in this configuration the scheduler cannot drive, as a sentence."""
    wrong = []
    if config.scheduler_config.policy != "fcfs":
        wrong.append(f"--scheduling-policy {config.scheduler_config.policy} (the queues are replaced)")
    if not config.scheduler_config.enable_chunked_prefill:
        wrong.append("chunked prefill switched off")
    return f"the scheduler cannot drive {'; '.join(wrong)}." if wrong else None
