"""A materialization that was looked up and not run yet: its key, its sections, its expected cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.materialize.options import Options
from coldstart.materialize.progress import Phase, no_progress
from coldstart.models.inspection import Lookup

if TYPE_CHECKING:
    from coldstart.materialize.expectation import Expectation


@dataclass(frozen=True)
class MaterializationPlan:
    """The look-up of a model and the options with which its bundle is built."""

    lookup: Lookup
    options: Options

    @property
    def key(self) -> Key:
        """Key of the bundle."""
        return self.lookup.key

    @property
    def sections(self) -> tuple[str, ...]:
        """Sections to write."""
        return self.options.sections

    @property
    def existing(self) -> Bundle | None:
        """Trusted bundle of this key, None where there is none."""
        return self.lookup.bundle

    def estimate(self) -> Expectation | None:
        """Return the expected time and disk space; None where nothing is built or the cost model does not apply."""
        if self.existing is not None and not self.options.force:
            return None
        from coldstart.materialize import expectation  # numpy, which a program that only serves does without

        return expectation.expected(self.lookup, self.options)

    def run(self, on_progress: Phase | None = None) -> Bundle:
        """Build and publish the bundle, or return the existing one.

        Args:
            on_progress: Entered around each stage; None reports nothing.

        Raises:
            CommandFailedError: The engine or the proof start failed, or this machine takes no snapshot.
            NoSpaceError: The disk is full.
            ReadOnlyStoreError: The store is not writable.
        """
        from coldstart.materialize import materialize

        return materialize.materialize(self.lookup, self.options, on_progress or no_progress)
