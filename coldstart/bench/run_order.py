"""Start modes that a benchmark measures, and the order of their runs.

Every round contains each mode once, so that slow periods of the machine affect all modes alike. The order rotates, so
that no mode always runs after the same other mode (its page cache, its heat).
"""

from __future__ import annotations

from coldstart.launch import modes
from coldstart.validate.launchers import FRESH as FRESH
from coldstart.validate.launchers import VLLM_COLD as VLLM_COLD
from coldstart.validate.launchers import VLLM_WARM as VLLM_WARM

RUNTIME_SNAPSHOT, TEMPLATE_RUNTIME = modes.RUNTIME_SNAPSHOT.name, modes.TEMPLATE_RUNTIME.name
TEMPLATE_ENGINE, SNAPSHOT = modes.TEMPLATE_ENGINE.name, modes.SNAPSHOT.name
MODES = (VLLM_COLD, VLLM_WARM, *reversed(modes.repeatable_names()))
BASELINES = (VLLM_COLD, VLLM_WARM)
REFERENCE = VLLM_WARM


def count_warmups(mode: str, wanted: int, *, cold_first: bool) -> int:
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
