"""Fall back to vLLM's own scheduler if PolicyScheduler does not support the installed vLLM or its configuration."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.scheduling.settings import uses_deadlines
from coldstart.vllm import compat
from coldstart.vllm.scheduling import OFFLOADING_MODULE, SCHEDULER_CLS

METRICS_ENV = "PROMETHEUS_MULTIPROC_DIR"
SECTION = "scheduler"


def drop_unsupported_scheduler(args: Namespace, config: Any, plan: LaunchPlan) -> bool:
    """Remove unsupported scheduler arguments from `args`, and add the reasons to the plan's fallbacks.

    Returns:
        Whether `args` has changed, so that `config` must be created again.
    """
    if args.scheduler_cls != SCHEDULER_CLS or not (reason := _find_incompatibility(config)):
        return False
    plan.fallbacks.append(Fallback(SECTION, f"{reason}; vLLM's own scheduler runs instead"))
    args.scheduler_cls, args.additional_config, args.kv_transfer_config = None, {}, None
    return True


def choose_engine_client(config: Any, plan: LaunchPlan) -> Any:
    """Return the engine client class: DeadlineLLM if deadlines are enabled, otherwise vLLM's own."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if not uses_deadlines(config.additional_config):
        return AsyncLLM
    module = "coldstart.vllm.scheduling.deadlines"
    if reason := compat.find_unsupported_reason("deadline", partial(import_module, module)):
        plan.fallbacks.append(Fallback(SECTION, f"{reason}; requests have no deadlines"))
        return AsyncLLM
    return import_module(module).DeadlineLLM


@contextmanager
def publish_counters(plan: LaunchPlan) -> Iterator[None]:
    """Publish the counters of PolicyScheduler in the server's /metrics while this block runs.

    prometheus_client shares values between processes through a directory, which is removed at the end of the block.
    """
    if SCHEDULER_CLS not in plan.vllm_args or METRICS_ENV in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="coldstart-metrics-", ignore_cleanup_errors=True) as directory:
        os.environ[METRICS_ENV] = directory
        # A template imported the library before the directory was set.
        from prometheus_client import values

        values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            del os.environ[METRICS_ENV]


def _find_incompatibility(config: Any) -> str | None:
    if reason := compat.find_unsupported_reason("scheduler"):
        return reason
    try:
        if reason := import_module(SCHEDULER_CLS.rpartition(".")[0]).find_unsupported(config):
            return str(reason)
        if config.kv_transfer_config is not None:
            import_module(OFFLOADING_MODULE)
        return None
    except Exception as problem:  # noqa: BLE001 - the server must start after any error of an unknown vLLM
        return f"cannot load the scheduler: {type(problem).__name__}: {problem}"
