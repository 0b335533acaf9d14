"""Template that sleeps on vLLM's CPU build: the platform reports sleep mode, and memory files take the device's place.

    python -P tests/support/sleeping_engine.py SOCKET LEVEL PLAN_FD

With the level `server` it is a server of a host instead, whose engine is awake and sleeps when the host asks for it.
Its worker unmaps every weight when it sleeps, as on a device. At level 1 a copy restores them, at level 2 they are loaded
again. Its calls are written beside the socket, and when the application is built. For the double of the driver, if one is
used, the worker's process uses a device. The engine, the scheduler's pause and the reload of weights are vLLM's.
"""

import os
import sys
from pathlib import Path

from vllm.platforms.cpu import CpuPlatform

from coldstart.contract.plan import LaunchPlan
from coldstart.vllm.engine import server, template, worker
from coldstart.vllm.engine.application import EarlyApplication

SLEEP, WAKE_UP, BUILD = worker.ColdWorker.sleep, worker.ColdWorker.wake_up, EarlyApplication.start_building
ASKED = Path(sys.argv[1]).with_name("asked")


def _note(text: str) -> None:
    with ASKED.open("a") as file:
        file.write(f"{text}\n")


def sleep(self: worker.ColdWorker, level: int = 1) -> None:
    """Sleep as the backend does on a CPU, and note the call."""
    SLEEP(self, level)
    _note(f"sleep {level}")
    if (place := os.environ.get("CUDA_FAKE_CHECKPOINTS")) and not (
        own := Path(place) / str(os.getpid())
    ).exists():
        own.write_text("0")


def wake_up(self: worker.ColdWorker, tags: list[str] | None = None) -> None:
    """Wake up as the backend does on a CPU, and note the call."""
    WAKE_UP(self, tags)
    _note(f"wake {tags}")


def start_building(self: EarlyApplication, *arguments: object) -> None:
    """Note the call, and build the application."""
    _note("build")
    BUILD(self, *arguments)


def serve(plan: str) -> int:
    """Run a server as a host starts it, with vLLM's routes for development."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    return server.run(LaunchPlan.parse(Path(f"/proc/self/fd/{plan}").read_text()))


if __name__ == "__main__":
    CpuPlatform.is_sleep_mode_available = lambda self: True
    worker.ColdWorker.sleep, worker.ColdWorker.wake_up = sleep, wake_up
    EarlyApplication.start_building = start_building
    worker.ColdWorker.checkpoint_prepare = lambda self: _note("prepare")
    worker.ColdWorker.checkpoint_restore = lambda self: _note("restore")
    if sys.argv[2] == "server":
        sys.exit(serve(*sys.argv[3:]))
    template.main(sys.argv[1:])
