"""A materialization that was looked up and not run yet: its key, its sections, its expected cost."""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.materialize.options import Options
from coldstart.materialize.progress import Phase, no_progress
from coldstart.models.inspection import Lookup
from coldstart.system import runtime

# Weights, offline run, digests of the weights, proof and publication.
_STAGES_ON_CPU = 5


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

    def earlier_seconds(self) -> float | None:
        """Return how long the model's last materialization on this hardware took, in seconds; None if unknown or not needed."""
        if self.existing is not None and not self.options.force:
            return None
        from coldstart.materialize.materialize import estimates

        return sum(estimates(self.lookup).values()) or None

    def count_stages(self) -> int | None:
        """Return the number of stages of `run`; None on a GPU, where the engine decides how many graphs are recorded."""
        if not runtime.targets_cpu():
            return None
        from coldstart.materialize import freeze

        builds = self.existing is None or self.options.force
        freezes = self.options.snapshot and (builds or not freeze.has_snapshot(self.lookup, self.existing))
        return builds * _STAGES_ON_CPU + freezes

    def run(self, on_progress: Phase | None = None) -> Bundle:
        """Build and publish the bundle, or return the existing one.

        Args:
            on_progress: Entered around each phase; None reports nothing.

        Raises:
            CommandFailedError: The engine or the verification run failed, or this machine takes no snapshot.
            NoSpaceError: The disk is full.
            ReadOnlyStoreError: The store is not writable.
        """
        from coldstart.materialize import materialize

        return materialize.materialize(self.lookup, self.options, on_progress or no_progress)
