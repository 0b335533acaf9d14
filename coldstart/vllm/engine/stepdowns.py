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
    if ranks := count_own_ranks(args):
        # vLLM imports the executor in this process; only the engine process imports our worker, which takes longer.
        # vLLM's own executor starts the ranks of a pipeline, and could not replace a worker that it cannot import.
        module = (EXECUTOR if ranks == 1 else WORKER).rpartition(".")[0]
        if (reason := compat.check("worker", partial(import_module, module))) is None:
            args.distributed_executor_backend = EXECUTOR if ranks == 1 else "mp"
            args.worker_cls = WORKER
            return fallbacks
        reason = f"{reason} vLLM's own worker runs and compiles."
        fallbacks += [Fallback(stage, reason) for stage in ("worker", "compile")]
    return fallbacks


def count_own_ranks(args: Namespace) -> int:
    """Return the number of pipeline ranks that our worker can run, 0 if it cannot.

    It runs on the CPU, without other parallelism, unless the user chose another executor or worker.
    """
    from vllm.platforms import current_platform

    ranks: int = args.pipeline_parallel_size
    chosen = args.distributed_executor_backend
    usable = not chosen or (chosen == "mp" and ranks > 1)
    alone = args.tensor_parallel_size * args.data_parallel_size == 1
    return ranks if current_platform.is_cpu() and alone and usable and args.worker_cls == "auto" else 0


def reports(args: Namespace) -> bool:
    """Return whether the workers of this server report something, whatever the plan requests."""
    return bool(args.worker_cls == WORKER or args.load_format == LOAD_FORMAT)


def report(fallbacks: Fallbacks) -> None:
    """Write fallbacks to this process's log, for processes that have no report."""
    for fallback in fallbacks:
        sys.stderr.write(f"coldstart: {fallback}\n")
