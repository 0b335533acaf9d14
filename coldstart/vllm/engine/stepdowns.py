"""Fall back to stock vLLM arguments where this vLLM version lacks an integration point; every fallback is named."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from importlib import import_module

from coldstart.contract.fallback import Fallback
from coldstart.vllm import compat
from coldstart.vllm.weights.entry import LOAD_FORMAT

EXECUTOR = "coldstart.vllm.engine.executor.ColdExecutor"
WORKER = "coldstart.vllm.engine.worker.ColdWorker"
_CPU_WORKER = "vllm.v1.worker.cpu_worker"
VLLM_WORKER = f"{_CPU_WORKER}.CPUWorker"
# Given to vLLM's own workers, so that they too can say how they loaded.
EXTENSION = "coldstart.vllm.weights.extension.Reporting"

Fallbacks = list[Fallback]


def settle(args: Namespace) -> Fallbacks:
    """Set our executor, worker and loader in `args` unless the user chose others or vLLM lacks an integration point."""
    fallbacks: Fallbacks = []
    if args.load_format == LOAD_FORMAT and (reason := compat.check("weights")):
        args.load_format = "auto"
        fallbacks.append(Fallback("weights", f"{reason} vLLM loads them its own way."))
    if can_use_executor(args):
        # vLLM imports the executor in this process; the engine process alone imports our worker, which takes longer.
        if (reason := compat.check("worker", partial(import_module, EXECUTOR.rpartition(".")[0]))) is None:
            args.distributed_executor_backend, args.worker_cls = EXECUTOR, WORKER
            return fallbacks
        reason = f"{reason} vLLM's own worker runs, and compiles."
        fallbacks += [Fallback(stage, reason) for stage in ("worker", "compile")]
    if args.load_format == LOAD_FORMAT and not args.worker_extension_cls:
        args.worker_extension_cls = EXTENSION
    return fallbacks


def can_use_executor(args: Namespace) -> bool:
    """Whether this server can run on our executor: one CPU rank, and no executor or worker of the user's own."""
    from vllm.platforms import current_platform

    single = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size == 1
    return (
        current_platform.is_cpu()
        and single
        and not args.distributed_executor_backend
        and args.worker_cls == "auto"
    )


def reports(args: Namespace) -> bool:
    """Whether the workers of this server can be asked for their `coldstart_report`."""
    return bool(args.worker_cls == WORKER or args.worker_extension_cls == EXTENSION)


def say(fallbacks: Fallbacks) -> None:
    """To whoever reads this process's log, where there is no report to put it in."""
    for fallback in fallbacks:
        sys.stderr.write(f"coldstart: {fallback}\n")
