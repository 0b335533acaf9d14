"""Choose coldstart's executor, worker, loader and KV connector, or else vLLM's own components, and report the reason."""

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


def select_components(args: Namespace) -> Fallbacks:
    """Select coldstart's executor, worker and loader in `args` unless the user chose others. Return the fallbacks.

    If the installed vLLM cannot load coldstart's KV connector, the connector is removed from `args`.
    """
    fallbacks: Fallbacks = []
    if args.load_format == LOAD_FORMAT and (reason := compat.find_unsupported_reason("weights")):
        args.load_format = "auto"
        fallbacks.append(Fallback("weights", f"{reason}; vLLM's own loader reads the weights"))
    if uses_handover(args) and (
        reason := compat.find_unsupported_reason("handover", partial(import_module, CONNECTOR))
    ):
        drop_handover(args, fallbacks, reason)
    if ranks := count_supported_ranks(args):
        # Check only the executor here: the engine process imports coldstart's worker, which takes longer. With several ranks,
        # vLLM's own executor starts the workers and cannot replace one that it cannot import, so check the worker.
        module = (EXECUTOR if ranks == 1 else WORKER).rpartition(".")[0]
        if (reason := compat.find_unsupported_reason("worker", partial(import_module, module))) is None:
            args.distributed_executor_backend = EXECUTOR if ranks == 1 else "mp"
            args.worker_cls = WORKER
            return fallbacks
        reason = f"{reason}; vLLM's own worker runs, and compiles the model"
        fallbacks += [Fallback(stage, reason) for stage in ("worker", "compile")]
    return fallbacks


def uses_handover(args: Namespace) -> bool:
    """Return whether `args` select coldstart's KV connector."""
    return getattr(args.kv_transfer_config, "kv_connector_module_path", None) == CONNECTOR


def drop_handover(args: Namespace, fallbacks: Fallbacks, reason: str) -> None:
    """Remove the KV connector from `args`, and add the reason to the fallbacks."""
    args.kv_transfer_config = None
    fallbacks.append(Fallback("handover", f"{reason}; requests are moved without their KV"))


def count_supported_ranks(args: Namespace) -> int:
    """Return the number of pipeline ranks that coldstart's worker can run, or 0 if it cannot run this server.

    The worker supports only the CPU and pipeline parallelism, and only if the user chose no other executor or worker.
    """
    from vllm.platforms import current_platform

    ranks: int = args.pipeline_parallel_size
    chosen = args.distributed_executor_backend
    usable = not chosen or (chosen == "mp" and ranks > 1)
    alone = args.tensor_parallel_size * args.data_parallel_size == 1
    return ranks if current_platform.is_cpu() and alone and usable and args.worker_cls == "auto" else 0


def has_reporting_workers(args: Namespace) -> bool:
    """Return whether the workers of this server report fallbacks even if the launch plan restores nothing."""
    return bool(args.worker_cls == WORKER or args.load_format == LOAD_FORMAT)


def log_fallbacks(fallbacks: Fallbacks) -> None:
    """Write the fallbacks to stderr, for processes that send no readiness report."""
    for fallback in fallbacks:
        sys.stderr.write(f"coldstart: {fallback}\n")
