"""Which mode runs when: every round holds each mode once, in an order that rotates from round to round.

Interleaving gives every mode the same share of a machine's slow minutes; rotating the order keeps one mode
from always running after the same other one (its page cache, its heat).
"""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.launch.modes import (
    repeatable_names,
    runtime_snapshot,
    snapshot,
    template_engine,
    template_runtime,
)
from coldstart.validate.launchers import FRESH as FRESH
from coldstart.validate.launchers import VLLM_COLD as VLLM_COLD
from coldstart.validate.launchers import VLLM_WARM as VLLM_WARM

RUNTIME_SNAPSHOT, TEMPLATE_RUNTIME, TEMPLATE_ENGINE, SNAPSHOT = (
    mode.name
    for mode in (
        runtime_snapshot.RUNTIME_SNAPSHOT,
        template_runtime.TEMPLATE_RUNTIME,
        template_engine.TEMPLATE_ENGINE,
        snapshot.SNAPSHOT,
    )
)
MODES = (VLLM_COLD, VLLM_WARM, *reversed(repeatable_names()))
BASELINES = (VLLM_COLD, VLLM_WARM)
REFERENCE = VLLM_WARM


def rounds(modes: Sequence[str], runs: int) -> list[list[str]]:
    """`runs` rounds of all modes; round r starts at mode r modulo their number.

    Raises ValueError for an unknown or repeated mode, or fewer than one run.
    """
    check(modes, runs)
    return [rotated(modes, index) for index in range(runs)]


def rotated(modes: Sequence[str], by: int) -> list[str]:
    """The modes, starting at index `by` modulo their number; in their order, wrapped around."""
    start = by % len(modes) if modes else 0
    return [*modes[start:], *modes[:start]]


def warmups(mode: str, wanted: int, *, cold_first: bool = False) -> int:
    """Uncounted runs before the first round.

    A cold start has none, since warming is what it must not have; warm caches need one start to exist at all, and with
    `cold_first` the first round's cold start is that one.
    """
    if mode == VLLM_COLD:
        return 0
    return max(wanted, 1) - cold_first if mode == VLLM_WARM else wanted


def is_process_of_its_own(mode: str) -> bool:
    """Whether a start in this mode begins with an empty interpreter, and thus has to import."""
    return mode in (*BASELINES, FRESH)


def check(modes: Sequence[str], runs: int) -> None:
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"unknown mode {unknown[0]!r}; the modes are {', '.join(MODES)}")
    if len(set(modes)) != len(modes) or not modes:
        raise ValueError("name at least one mode, and each mode once")
    if runs < 1:
        raise ValueError(f"at least one run is needed, not {runs}")
