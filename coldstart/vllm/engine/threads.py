"""Configure the OpenMP threads and CPUs of forked workers, because vLLM configures those of spawned workers only."""

from __future__ import annotations

import os

import torch
from vllm.config import VllmConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager

set_num_threads = torch.set_num_threads
"""torch's own function. vLLM's CPU worker disables it, but a worker that is adopted after a fork needs it."""


def use_serving_threads(config: VllmConfig, rank: int | None = None) -> None:
    """Set torch's number of OpenMP threads to the number that vLLM's own worker uses on this machine.

    If that changes the number, a worker process with the local rank `rank` is also bound to the CPUs of that rank. A process
    that already has this number is taken for one that vLLM spawned with these settings.
    """
    manager = OMPProcessManager(config)
    if manager.skip_setup:
        return
    cpus = manager.cpu_lists[rank or 0]
    if torch.get_num_threads() == len(cpus):
        return
    if rank is not None:
        os.sched_setaffinity(0, cpus)
    set_num_threads(len(cpus))
