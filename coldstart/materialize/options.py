"""Options of a materialization, and the interface that reports its progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from coldstart.errors import UsageError
from coldstart.scheduling import profiling
from coldstart.scheduling.declaration import setting

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
    """Options of a materialization. Raises UsageError if the time limit is invalid."""

    force: bool = setting(False, "Build a new version even if a bundle exists.", "--force")
    snapshot: bool = setting(False, "Also write a CRIU snapshot of the built engine.", "--snapshot")
    profile_s: float = setting(
        profiling.BUDGET_S,
        "Time limit for measuring step latencies, in seconds; a lower limit covers fewer batch sizes.",
        "--profile-seconds",
    )
    graphs: bool = setting(
        False,
        "Also record CUDA graphs (single GPU only). Experimental: no speed-up has been measured so far.",
        "--graphs",
    )
    faster_graphs: bool = setting(
        False,
        "Record CUDA graphs, start with and without them, and publish them only if the start with them is faster.",
        "--graphs-if-faster",
    )

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
