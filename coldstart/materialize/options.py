"""Options of a materialization, and the interface that reports its progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from coldstart.errors import UsageError
from coldstart.scheduling import profiling

SECTIONS = ("kv", "compile", "graphs", "modelinfo", "weights", "iterations", "stages")
Steps = Callable[[str], None]
Phase = Callable[[str], AbstractContextManager[Steps]]
"""Function that returns a context manager for the stage of this name, which yields a function to report steps of the stage."""


@contextmanager
def no_progress(name: str) -> Iterator[Steps]:
    """Ignore the progress of a stage. This function is a `Phase`."""
    yield lambda step: None


@dataclass(frozen=True)
class Options:
    """Options of a materialization.

    - `force`: build a new version even if a bundle for the key exists.
    - `graphs`: also record CUDA graphs (experimental; no speed-up measured).
    - `faster_graphs`: also record CUDA graphs, and publish them only if a start is shorter with them.
    - `snapshot`: add a process snapshot.
    - `profile_s`: time limit for profiling step latency, in seconds.
    """

    force: bool = False
    snapshot: bool = False
    profile_s: float = profiling.BUDGET_S
    graphs: bool = False
    faster_graphs: bool = False

    def __post_init__(self) -> None:
        if not self.profile_s > 0 or math.isinf(self.profile_s):
            raise UsageError(
                f"invalid --profile-seconds {self.profile_s}: expected a finite number greater than 0",
                hint="use --profile-seconds 120, or less to measure fewer batch sizes",
            )

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the names of the bundle sections to build."""
        return tuple(name for name in SECTIONS if name != "graphs" or self.graphs or self.faster_graphs)
