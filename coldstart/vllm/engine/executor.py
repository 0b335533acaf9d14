"""The worker inside the engine process: no third process, no third import.

vLLM turns its single-process executor into the multi-process one on the CPU, because OpenMP must be configured
before the worker's first import; an executor class given by qualified name is left alone, and this one configures
the threads itself: same number as vLLM's binding would give (so the same reductions, so the same tokens).
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from coldstart.contract.plan import LaunchPlan
from coldstart.machine import timeline
from coldstart.machine.lifeline import die_with_parent

# vLLM's CPU worker replaces torch.set_num_threads by a refusal; a worker adopted after a fork still needs it.
_set_num_threads = torch.set_num_threads
_built: dict[tuple[str, str, str, int], WorkerWrapperBase] = {}


class ColdExecutor(UniProcExecutor):
    """Builds the worker in this process, or adopts the one that a template process built before the fork."""

    def _init_executor(self) -> None:
        die_with_parent()
        use_serving_threads(self.vllm_config)
        worker = _built.pop(worker_key(self.vllm_config), None)
        if worker is not None:
            self.driver_worker = worker
            # How KV is kept on the host belongs to this server, not to what was built before.
            worker.worker.vllm_config.kv_transfer_config = self.vllm_config.kv_transfer_config
            return
        with timeline.measure("build worker", track="engine"):
            super()._init_executor()


def prebuild(config: VllmConfig) -> None:
    """Build a worker with one OpenMP thread (no team, so the process can be forked) and keep it for adoption."""
    _set_num_threads(1)
    executor = _Prebuilder(config)
    executor.collective_rpc("warm_up")
    _built[worker_key(config)] = executor.driver_worker
    torch.set_num_threads = _set_num_threads


def worker_key(config: VllmConfig) -> tuple[str, str, str, int]:
    """What a built worker was made for: the bundle's key (model, engine arguments, machine) and the weights' bytes."""
    plan = LaunchPlan.current()
    return plan.key, plan.weights, str(config.load_config.load_format), config.model_config.seed


class _Prebuilder(UniProcExecutor):
    """Only the construction of the worker, in a template process."""


def use_serving_threads(config: VllmConfig) -> None:
    """Give torch the number of OpenMP threads that vLLM's own worker would have on this machine."""
    manager = OMPProcessManager(config)
    if not manager.skip_setup and torch.get_num_threads() != (count := len(manager.cpu_lists[0])):
        _set_num_threads(count)
