"""Let the processes of a rehearsal sleep and park on vLLM's CPU build, with memory files in place of the device's memory.

Python imports this module at the start of every process whose PYTHONPATH has its directory.
"""

from __future__ import annotations

from types import ModuleType

from coldstart.vllm import late


def permit_modes(module: ModuleType) -> None:
    """Permit the modes that need a device."""
    module.STANDBY.cpu_limit = module.PARKED_ENGINE.cpu_limit = None


def permit_sleep(module: ModuleType) -> None:
    """Let vLLM accept --enable-sleep-mode."""
    module.CpuPlatform.is_sleep_mode_available = lambda self: True


def permit_parking(module: ModuleType) -> None:
    """Let a worker that sleeps be a process that the double of the driver knows, as it knows each one with a context."""
    from coldstart.graphs.cuda.driver import primary_context

    suspend = module.ColdWorker.sleep
    module.ColdWorker.sleep = lambda self, level=1: (suspend(self, level), primary_context())[0]
    module.ColdWorker.checkpoint_prepare = module.ColdWorker.checkpoint_restore = lambda self: None


late.run_when_imported("coldstart.launch.modes", permit_modes)
late.run_when_imported("vllm.platforms.cpu", permit_sleep)
late.run_when_imported("coldstart.vllm.engine.worker", permit_parking)
