"""Which ways of starting an engine has: a GPU's none that forks or freezes CUDA, a CPU's none that empties a device."""

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

_CPU = {
    "standby": Refusal(
        "vLLM's sleep mode is for devices: its CPU build would keep all of its memory",
        "coldstart template start MODEL --level engine",
    ),
}
SLEEP_LEVELS = {"asleep-1": 1, "asleep-2": 2}
"""The levels of a template that sleeps, which is the mode `standby`, as vLLM counts them."""
MODES = ("fresh", "template-runtime", "runtime-snapshot", "template-engine", "snapshot", "standby")


def refusal(mode: str) -> Refusal | None:
    """Why this mode cannot be taken with the installed vLLM, or None."""
    return (_CPU if runtime.targets_cpu() else _GPU).get(mode)


def refusals() -> dict[str, Refusal]:
    """Every mode that cannot be taken with the installed vLLM."""
    return {mode: found for mode in MODES if (found := refusal(mode))}
