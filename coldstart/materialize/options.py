"""Options of `materialize`: which sections to write, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coldstart.errors import UsageError
from coldstart.materialize.graphs import Kernels
from coldstart.scheduling import profiling

SECTIONS = ("kv", "compile", "graphs", "modelinfo", "tokenizer", "weights", "iterations", "stages")


@dataclass(frozen=True)
class Options:
    """How to materialize. `only` restricts the sections; without `force` an existing bundle for the key is returned.

    `kernels`: CUDA kernels' binaries are copied (value), or named by library, build id and offset (reference).
    `profile_s`: how many seconds the iteration profile may take.
    """

    only: Sequence[str] = ()
    force: bool = False
    snapshot: bool = False
    kernels: Kernels = "value"
    profile_s: float = profiling.BUDGET_S

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SECTIONS):
            raise UsageError(
                f"There is no section {', '.join(sorted(unknown))}.",
                hint=f"choose among {', '.join(SECTIONS)}",
            )
        if not self.profile_s > 0 or math.isinf(self.profile_s):
            raise UsageError(
                f"An iteration profile cannot be given {self.profile_s} seconds.",
                hint="--profile-seconds 120, or fewer for fewer sizes and rounds",
            )

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections to write."""
        return tuple(name for name in SECTIONS if not self.only or name in self.only)
