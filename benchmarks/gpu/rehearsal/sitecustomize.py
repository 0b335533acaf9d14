"""Let the processes of a rehearsal sleep and park on vLLM's CPU build, with memory files in place of the device's memory.

Python imports this module at the start of every process whose PYTHONPATH has its directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from coldstart.vllm import late


def permit_modes(module: ModuleType) -> None:
    """Permit the modes that need a device."""
    module.STANDBY.cpu_limit = module.PARKED_ENGINE.cpu_limit = None


def permit_sleep(module: ModuleType) -> None:
    """Let vLLM accept --enable-sleep-mode."""
    module.CpuPlatform.is_sleep_mode_available = lambda self: True


def permit_parking(module: ModuleType) -> None:
    """Let a worker that sleeps be a process that the double of the driver knows."""
    suspend = module.ColdWorker.sleep

    def sleep(self: Any, level: int = 1) -> None:
        suspend(self, level)
        state = Path(os.environ["CUDA_FAKE_CHECKPOINTS"]) / str(os.getpid())
        if not state.exists():
            state.write_text("0")

    module.ColdWorker.sleep = sleep
    module.ColdWorker.checkpoint_prepare = module.ColdWorker.checkpoint_restore = lambda self: None


late.run_when_imported("coldstart.launch.modes", permit_modes)
late.run_when_imported("vllm.platforms.cpu", permit_sleep)
late.run_when_imported("coldstart.vllm.engine.worker", permit_parking)
