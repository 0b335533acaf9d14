"""The worker inside the engine process: no third process, no third import.

vLLM turns its single-process executor into the multi-process one on the CPU, because OpenMP must be configured
before the worker's first import; an executor class given by qualified name is left alone, and this one configures
the threads itself: same number as vLLM's binding would give (so the same reductions, so the same tokens).
"""

from __future__ import annotations

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

# vLLM's CPU worker replaces torch.set_num_threads by a refusal; a worker adopted after a fork still needs it.
_set_num_threads = torch.set_num_threads


@dataclass(frozen=True)
class _Built:
    worker: WorkerWrapperBase
    facts: Mapping[str, object]


_kept: list[_Built] = []


class ColdExecutor(UniProcExecutor):
    """Builds the worker in this process, or adopts the one that a template process built before the fork."""

    def _init_executor(self) -> None:
        die_with_parent()
        use_serving_threads(self.vllm_config)
        built = _kept.pop() if _kept else None
        reason = adoption.difference(built.facts, facts(self.vllm_config)) if built is not None else None
        if built is not None and reason is None:
            self._adopt(built.worker)
            return
        with timeline.measure("build worker", track="engine"):
            require_worker(self.vllm_config)
            super()._init_executor()
        if reason is not None:
            self.driver_worker.worker.stand_in(reason)

    def _adopt(self, worker: WorkerWrapperBase) -> None:
        self.driver_worker = worker
        # How KV is kept on the host belongs to this server and not to what was built before.
        worker.worker.kv_transfer_config = self.vllm_config.kv_transfer_config
        worker.worker.vllm_config.kv_transfer_config = self.vllm_config.kv_transfer_config


def require_worker(config: VllmConfig) -> None:
    """Have vLLM's own worker run where ours cannot be imported, with the reason in its report."""
    if config.parallel_config.worker_cls != stepdowns.WORKER:
        return
    if reason := compat.check("worker", _import_worker):
        compat.fall_back("worker", f"{reason} vLLM's own worker runs, and compiles.")
        config.parallel_config.worker_cls = stepdowns.VLLM_WORKER
        config.parallel_config.worker_extension_cls = stepdowns.EXTENSION


def _import_worker() -> None:
    import coldstart.vllm.engine.worker  # noqa: F401


def prebuild(config: VllmConfig) -> None:
    """Build a worker with one OpenMP thread (no team, so the process can be forked) and keep it for adoption."""
    given = facts(config)  # before building it fills some in
    _set_num_threads(1)
    executor = _Prebuilder(config)
    executor.collective_rpc("warm_up")
    _kept.append(_Built(executor.driver_worker, given))
    torch.set_num_threads = _set_num_threads


def obstacle(config: VllmConfig) -> str | None:
    """Why the worker that was built in this process is not for `config`, None where it is or there is none."""
    return adoption.difference(_kept[0].facts, facts(config)) if _kept else None


def facts(config: VllmConfig) -> dict[str, object]:
    """What a worker for `config` is made for: all that vLLM tells it, the bundle's key and the weights' bytes."""
    plan = LaunchPlan.current()
    return adoption.facts(config, **{"the bundle's key": plan.key, "the weights": plan.weights})


class _Prebuilder(UniProcExecutor):
    """Only the construction of the worker, in a template process."""


def use_serving_threads(config: VllmConfig) -> None:
    """Give torch the number of OpenMP threads that vLLM's own worker would have on this machine."""
    manager = OMPProcessManager(config)
    if not manager.skip_setup and torch.get_num_threads() != (count := len(manager.cpu_lists[0])):
        _set_num_threads(count)
