"""Executor that runs the worker inside the engine process, which avoids another process and another import of torch.

On the CPU, vLLM replaces its single-process executor with the multi-process one, because OpenMP must be configured before
the worker's first import. vLLM does not replace an executor given by qualified name. This executor configures the same
number of threads as vLLM's CPU binding, so reductions and tokens are the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from coldstart.contract.plan import LaunchPlan
from coldstart.system import timeline
from coldstart.vllm import compat
from coldstart.vllm.engine import adoption, components, threads


@dataclass
class _Built:
    """Worker that was built by a template, with its engine arguments and the reason why it does not match this server."""

    worker: WorkerWrapperBase
    arguments: Mapping[str, str]
    unfit: str | None = None


_kept: list[_Built] = []


class ColdExecutor(UniProcExecutor):
    """Executor that builds the worker in this process, or adopts the worker that a template built before the fork."""

    def _init_executor(self) -> None:
        threads.use_serving_threads(self.vllm_config)
        built = _kept.pop() if _kept else None
        if built is not None and built.unfit is None:
            self._adopt(built.worker)
            return
        with timeline.measure("build worker", track="engine"):
            use_vllm_worker_if_needed(self.vllm_config)
            super()._init_executor()
        if built is not None:
            self.driver_worker.worker.fall_back("worker", built.unfit)

    def _adopt(self, worker: WorkerWrapperBase) -> None:
        self.driver_worker = worker
        worker.worker.take_over(self.vllm_config.kv_transfer_config)


def use_vllm_worker_if_needed(config: VllmConfig) -> None:
    """Select vLLM's own worker if coldstart's worker cannot be imported, and record the reason."""
    if config.parallel_config.worker_cls != components.WORKER:
        return
    module = components.WORKER.rpartition(".")[0]
    if reason := compat.find_unsupported_reason("worker", partial(import_module, module)):
        compat.record_fallback("worker", f"{reason}; vLLM's own worker runs, and compiles the model")
        config.parallel_config.worker_cls = components.VLLM_WORKER


def prebuild_worker(config: VllmConfig, arguments: Mapping[str, str]) -> None:
    """Build a worker for adoption. The worker has one OpenMP thread, because a thread team does not survive a fork."""
    threads.set_num_threads(1)
    executor = UniProcExecutor(config)
    executor.collective_rpc("warm_up")
    _kept.append(_Built(executor.driver_worker, arguments))
    torch.set_num_threads = threads.set_num_threads


def find_worker_mismatch(args: Namespace, plan: LaunchPlan) -> str | None:
    """Return the reason why the prebuilt worker does not match the server, or None if it matches or none was built.

    Call this before the engine process is forked: after a mismatch, the engine process builds another worker.
    """
    for built in _kept:
        built.unfit = adoption.find_difference(built.arguments, adoption.describe_worker(args, plan))
        return built.unfit
    return None
