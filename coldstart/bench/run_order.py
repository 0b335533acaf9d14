"""Order of the runs: every round contains each mode once, in an order that rotates from round to round.

Interleaving gives every mode the same share of slow periods of the machine; the rotation keeps one mode from always
running after the same other mode (its page cache, its heat).
"""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.launch import modes
from coldstart.validate.launchers import FRESH as FRESH
from coldstart.validate.launchers import VLLM_COLD as VLLM_COLD
from coldstart.validate.launchers import VLLM_WARM as VLLM_WARM

RUNTIME_SNAPSHOT, TEMPLATE_RUNTIME = modes.RUNTIME_SNAPSHOT.name, modes.TEMPLATE_RUNTIME.name
TEMPLATE_ENGINE, SNAPSHOT = modes.TEMPLATE_ENGINE.name, modes.SNAPSHOT.name
MODES = (VLLM_COLD, VLLM_WARM, *reversed(modes.repeatable_names()))
BASELINES = (VLLM_COLD, VLLM_WARM)
REFERENCE = VLLM_WARM


def rounds(modes: Sequence[str], runs: int) -> list[list[str]]:
    """Return `runs` rounds of all modes; round r starts at mode r modulo their number.

    Raises:
        ValueError: A mode is unknown or repeated, or `runs` is below 1.
    """
    check(modes, runs)
    return [rotated(modes, index) for index in range(runs)]


def rotated(modes: Sequence[str], by: int) -> list[str]:
    """Return the modes in cyclic order, starting at index `by` modulo their number."""
    start = by % len(modes) if modes else 0
    return [*modes[start:], *modes[:start]]


def warmups(mode: str, wanted: int, *, cold_first: bool = False) -> int:
    """Return the number of uncounted runs before the first round.

    A cold start has none, because it must not be warm. Warm caches need at least one earlier start; with `cold_first`
    the cold start of the first round is that start.
    """
    if mode == VLLM_COLD:
        return 0
    return max(wanted, 1) - cold_first if mode == VLLM_WARM else wanted


def is_process_of_its_own(mode: str) -> bool:
    """Return whether a start in this mode begins with an empty interpreter, and so has to import."""
    return mode in (*BASELINES, FRESH)


def check(modes: Sequence[str], runs: int) -> None:
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"unknown mode {unknown[0]!r}; the modes are {', '.join(MODES)}")
    if len(set(modes)) != len(modes) or not modes:
        raise ValueError("name at least one mode, and each mode once")
    if runs < 1:
        raise ValueError(f"runs must be 1 or more, found {runs}")
