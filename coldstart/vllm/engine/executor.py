"""Executor that runs the worker inside the engine process, without a third process or a third import.

On the CPU, vLLM replaces its single-process executor by the multi-process one, because OpenMP must be configured
before the worker's first import. vLLM does not replace an executor given by qualified name. This one configures
the same number of threads as vLLM's binding would, so reductions and tokens are the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from coldstart.contract.plan import LaunchPlan
from coldstart.system import timeline
from coldstart.system.proc.lifeline import die_with_parent
from coldstart.vllm import compat
from coldstart.vllm.engine import adoption, stepdowns

# vLLM's CPU worker disables torch.set_num_threads; a worker adopted after a fork still needs the original.
_set_num_threads = torch.set_num_threads


@dataclass
class _Built:
    """Worker of a template, the arguments that it was built for, and why it does not fit this process's server."""

    worker: WorkerWrapperBase
    arguments: Mapping[str, str]
    unfit: str | None = None


_kept: list[_Built] = []


class ColdExecutor(UniProcExecutor):
    """Executor that builds the worker in this process, or adopts the one that a template built before the fork."""

    def _init_executor(self) -> None:
        die_with_parent()
        use_serving_threads(self.vllm_config)
        built = _kept.pop() if _kept else None
        if built is not None and built.unfit is None:
            self._adopt(built.worker)
            return
        with timeline.measure("build worker", track="engine"):
            require_worker(self.vllm_config)
            super()._init_executor()
        if built is not None:
            self.driver_worker.worker.record_built_by_server(built.unfit)

    def _adopt(self, worker: WorkerWrapperBase) -> None:
        self.driver_worker = worker
        worker.worker.take_over(self.vllm_config.kv_transfer_config)


def require_worker(config: VllmConfig) -> None:
    """Make vLLM's own worker run if ours cannot be imported, and report the reason."""
    if config.parallel_config.worker_cls != stepdowns.WORKER:
        return
    if reason := compat.check("worker", _import_worker):
        compat.fall_back("worker", f"{reason} vLLM's own worker runs and compiles.")
        config.parallel_config.worker_cls = stepdowns.VLLM_WORKER


def _import_worker() -> None:
    import coldstart.vllm.engine.worker  # noqa: F401


def prebuild(config: VllmConfig, arguments: Mapping[str, str]) -> None:
    """Build a worker with one OpenMP thread (no team, so the process can be forked) and store it for adoption."""
    _set_num_threads(1)
    executor = UniProcExecutor(config)
    executor.collective_rpc("warm_up")
    _kept.append(_Built(executor.driver_worker, arguments))
    torch.set_num_threads = _set_num_threads


def check_built(args: Namespace, plan: LaunchPlan) -> str | None:
    """Return why the prebuilt worker of this process does not fit, None if it fits or does not exist.

    Call this before the engine's process is forked: it builds another worker then.
    """
    for built in _kept:
        built.unfit = adoption.difference(built.arguments, adoption.describe_worker(args, plan))
        return built.unfit
    return None


def use_serving_threads(config: VllmConfig) -> None:
    """Set torch's number of OpenMP threads to that of vLLM's own worker on this machine."""
    manager = OMPProcessManager(config)
    if not manager.skip_setup and torch.get_num_threads() != (count := len(manager.cpu_lists[0])):
        _set_num_threads(count)
