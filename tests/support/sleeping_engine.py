"""A template that sleeps, on vLLM's CPU build: the platform says that it can, and the worker's memory is a double's.

    python -P tests/support/sleeping_engine.py SOCKET LEVEL PLAN_FILE READY_FD

Its worker loses every weight when it sleeps, as a device's does: at level 1 they come back from a copy, at level 2 only if they
are loaded again. What it was asked for is written beside the socket. All else is vLLM's own: its engine, its scheduler's pause,
its reloading of weights.
"""

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
    template.main(sys.argv[1:])
