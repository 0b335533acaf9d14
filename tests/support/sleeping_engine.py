"""Template that sleeps on vLLM's CPU build: the platform reports sleep mode, and the worker's memory is simulated.

    python -P tests/support/sleeping_engine.py SOCKET LEVEL PLAN_FD READY_FD

Its worker loses every weight when it sleeps, as on a device: at level 1 a copy restores them, at level 2 they are loaded again.
Its calls are written beside the socket. For the double of the driver, if one is used, the worker's process uses a device. The
engine, the scheduler's pause and the reload of weights are vLLM's.
"""

import os
import sys
from pathlib import Path

import torch
from vllm.platforms.cpu import CpuPlatform

from coldstart.vllm.engine import template, worker

ASKED = Path(sys.argv[1]).with_name("asked")


def _note(text: str) -> None:
    with ASKED.open("a") as file:
        file.write(f"{text}\n")


def sleep(self: worker.ColdWorker, level: int = 1) -> None:
    """Keep a copy at level 1; the weights are zero from here on."""
    held = dict(self.model_runner.get_model().named_parameters())
    self.copies = {name: one.detach().clone() for name, one in held.items()} if level == 1 else {}
    with torch.no_grad():
        for one in held.values():
            one.zero_()
    _note(f"sleep {level}")
    if (place := os.environ.get("CUDA_FAKE_CHECKPOINTS")) and not (
        own := Path(place) / str(os.getpid())
    ).exists():
        own.write_text("0")


def wake_up(self: worker.ColdWorker, tags: list[str] | None = None) -> None:
    """The copy of level 1, where the weights are woken."""
    held = dict(self.model_runner.get_model().named_parameters())
    with torch.no_grad():
        for name, copy in self.copies.items() if tags is None or "weights" in tags else ():
            held[name].copy_(copy)
    _note(f"wake {tags}")


if __name__ == "__main__":
    CpuPlatform.is_sleep_mode_available = lambda self: True
    worker.ColdWorker.sleep, worker.ColdWorker.wake_up = sleep, wake_up
    worker.ColdWorker.checkpoint_prepare = lambda self: _note("prepare")
    worker.ColdWorker.checkpoint_restore = lambda self: _note("restore")
    template.main(sys.argv[1:])
