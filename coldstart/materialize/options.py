"""Options of a materialization, how its progress is shown, and a materialization that was looked up and not run yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.errors import UsageError
from coldstart.models.inspection import Lookup
from coldstart.scheduling import profiling

SECTIONS = ("kv", "compile", "graphs", "modelinfo", "weights", "iterations", "stages")
Steps = Callable[[str], None]
Phase = Callable[[str], AbstractContextManager[Steps]]
"""Entered around each stage, with its name; yields a function that takes each step of the stage."""


@contextmanager
def no_progress(name: str) -> Iterator[Steps]:
    """A `Phase` that reports nothing."""
    yield lambda step: None


@dataclass(frozen=True)
class Options:
    """Options of a materialization.

    - `only`: the sections to write, by default all but `graphs`.
    - `force`: build a new version even if a bundle for the key exists.
    - `graphs`: also record CUDA graphs, which `only` may name too; no start became shorter by them when measured.
    - `snapshot`: add a process snapshot.
    - `profile_s`: maximum duration of the iteration profile in seconds.
    """

    only: Sequence[str] = ()
    force: bool = False
    snapshot: bool = False
    profile_s: float = profiling.BUDGET_S
    graphs: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SECTIONS):
            raise UsageError(
                f"unknown section {', '.join(sorted(unknown))}",
                hint=f"choose from {', '.join(SECTIONS)}",
            )
        if not self.profile_s > 0 or math.isinf(self.profile_s):
            raise UsageError(
                f"invalid duration of the iteration profile: {self.profile_s} seconds, expected more than 0",
                hint="--profile-seconds 120, or less to measure fewer batch sizes",
            )

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the sections to write."""
        wanted = set(self.only) or set(SECTIONS) - {"graphs"}
        return tuple(name for name in SECTIONS if name in wanted or (name == "graphs" and self.graphs))


@dataclass(frozen=True)
class MaterializationPlan:
    """The lookup of a model and the options with which its bundle is built."""

    lookup: Lookup
    options: Options

    @property
    def key(self) -> Key:
        """Key of the bundle."""
        return self.lookup.key

    @property
    def sections(self) -> tuple[str, ...]:
        """Sections to write, and the snapshot."""
        return (*self.options.sections, *(["snapshot"] if self.options.snapshot else []))

    @property
    def existing(self) -> Bundle | None:
        """Trusted bundle of this key, or None if the store has none."""
        return self.lookup.bundle

    def run(self, on_progress: Phase | None = None) -> Bundle:
        """Build and publish the bundle, or return the existing one.

        Args:
            on_progress: Entered around each stage; None reports nothing.

        Raises:
            CommandFailedError: The engine or the verification run failed, or this machine takes no snapshot.
            NoSpaceError: The disk is full.
            ReadOnlyStoreError: The store is not writable.
        """
        from coldstart.materialize import materialize

        return materialize.materialize(self.lookup, self.options, on_progress or no_progress)
