"""A materialization that was looked up and not run yet."""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.materialize.options import Options, Phase, no_progress
from coldstart.models.inspection import Lookup


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
