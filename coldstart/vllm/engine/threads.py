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

    If `rank` is given, also bind this worker process to the CPUs of that local rank, unless vLLM has already bound it to
    some of them when it spawned the process.
    """
    manager = OMPProcessManager(config)
    if manager.skip_setup:
        return
    cpus = manager.cpu_lists[rank or 0]
    if rank is not None and not os.sched_getaffinity(0) <= set(cpus):
        os.sched_setaffinity(0, cpus)
    if torch.get_num_threads() != len(cpus):
        set_num_threads(len(cpus))
