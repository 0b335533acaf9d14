"""Which ways of starting a GPU engine has: those that hold before CUDA is initialised, and those that do not."""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.machine import runtime


@dataclass(frozen=True)
class Refusal:
    """Why a mode cannot be, and what there is instead."""

    reason: str
    mend: str


_GPU = {
    "template-engine": Refusal(
        "a built GPU engine cannot be forked: CUDA does not survive a fork",
        "coldstart template start MODEL --level runtime, which forks before CUDA is initialised",
    ),
    "snapshot": Refusal(
        "a CRIU image of a forked template holds no CUDA state",
        "vllm snapshot create MODEL --revision COMMIT, vLLM's own (one GPU, same host and device, root)",
    ),
    "runtime-snapshot": Refusal(
        "freezing a runtime that has asked the driver about its devices was never tried",
        "coldstart template start MODEL --level runtime",
    ),
}


def refusal(mode: str) -> Refusal | None:
    """Why this mode cannot be taken with the installed vLLM, or None."""
    return None if runtime.targets_cpu() else _GPU.get(mode)
