"""Fall back to stock vLLM arguments where this vLLM version lacks an integration point, and report each fallback."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from importlib import import_module

from coldstart.contract.fallback import Fallback
from coldstart.vllm import compat
from coldstart.vllm.handover import CONNECTOR
from coldstart.vllm.weights.entry import LOAD_FORMAT

EXECUTOR = "coldstart.vllm.engine.executor.ColdExecutor"
WORKER = "coldstart.vllm.engine.worker.ColdWorker"
_CPU_WORKER = "vllm.v1.worker.cpu_worker"
VLLM_WORKER = f"{_CPU_WORKER}.CPUWorker"

Fallbacks = list[Fallback]


def settle(args: Namespace) -> Fallbacks:
    """Set our executor, worker and loader in `args` unless the user chose others or vLLM lacks an integration point.

    A KV connector of ours that this vLLM cannot load is removed.
    """
    fallbacks: Fallbacks = []
    if args.load_format == LOAD_FORMAT and (reason := compat.check("weights")):
        args.load_format = "auto"
        fallbacks.append(Fallback("weights", f"{reason} vLLM's own loader reads them."))
    given = getattr(args.kv_transfer_config, "kv_connector_module_path", None)
    if given == CONNECTOR and (reason := compat.check("handover", partial(import_module, CONNECTOR))):
        args.kv_transfer_config = None
        fallbacks.append(Fallback("handover", f"{reason} Requests move without their KV."))
    if can_use_executor(args):
        # vLLM imports the executor in this process; only the engine process imports our worker, which takes longer.
        if (reason := compat.check("worker", partial(import_module, EXECUTOR.rpartition(".")[0]))) is None:
            args.distributed_executor_backend, args.worker_cls = EXECUTOR, WORKER
            return fallbacks
        reason = f"{reason} vLLM's own worker runs and compiles."
        fallbacks += [Fallback(stage, reason) for stage in ("worker", "compile")]
    return fallbacks


def can_use_executor(args: Namespace) -> bool:
    """Return whether this server can use our executor: one CPU rank, and no executor or worker chosen by the user."""
    from vllm.platforms import current_platform

    single = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size == 1
    return (
        current_platform.is_cpu()
        and single
        and not args.distributed_executor_backend
        and args.worker_cls == "auto"
    )


def reports(args: Namespace) -> bool:
    """Return whether the workers of this server report something, whatever the plan requests."""
    return bool(args.worker_cls == WORKER or args.load_format == LOAD_FORMAT)


def report(fallbacks: Fallbacks) -> None:
    """Write fallbacks to this process's log, for processes that have no report."""
    for fallback in fallbacks:
        sys.stderr.write(f"coldstart: {fallback}\n")
