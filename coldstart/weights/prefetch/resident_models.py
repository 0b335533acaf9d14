"""Models in memory, within a budget: models without a lease are evicted, least recently used first.

Invariant: the sum over models of max(planned, allocated) bytes is at most the budget. A request that does not
fit after eviction is rejected before any of its bytes are planned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from time import monotonic

from coldstart.weights.prefetch import configuration, region_layout
from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.errors import PrefetchRefusedError
from coldstart.weights.prefetch.model import PrefetchedModel
from coldstart.weights.prefetch.range_source import normalise
from coldstart.weights.prefetch.region import Allocator
from coldstart.weights.prefetch.schedule import UnitEntry


class Memory:
    """Models by the SHA-256 digest of their source and plan."""

    def __init__(self, settings: configuration.PrefetchSettings) -> None:
        self.models: dict[str, PrefetchedModel] = {}
        self._settings = settings
        self._budget: int | None = settings.memory_bytes
        self._allocator = Allocator()

    @property
    def budget(self) -> int:
        """Return the number of bytes that may be held; without a configured budget, it is measured at the first call."""
        if self._budget is None:
            self._budget = configuration.budget(self._settings)
        return self._budget

    @property
    def used(self) -> int:
        """Return the number of bytes that are allocated or planned."""
        return sum(model.charged for model in self.models.values())

    def find(self, source: str, plan: bytes, environment: Mapping[str, str]) -> PrefetchedModel:
        """Return the model of a source and a plan (as JSON); add it if it is unknown. Raises PrefetchRefusedError."""
        address = normalise(source)
        key = hashlib.sha256(address.encode() + b"\n" + plan).hexdigest()
        if key not in self.models:
            try:
                document = json.loads(plan)
            except (ValueError, RecursionError) as error:
                raise PrefetchRefusedError(f"The weights plan is not valid JSON: {error}.") from error
            if not isinstance(document, dict):
                raise PrefetchRefusedError("The weights plan is not a JSON object.")
            self._add(key, address, environment, region_layout.read(document))
        self.models[key].update_environment(environment)
        return self.models[key]

    def _add(
        self, key: str, address: str, environment: Mapping[str, str], layout: region_layout.RegionLayout
    ) -> None:
        try:
            self.models[key] = PrefetchedModel(key, address, environment, layout)
        except OSError as error:
            raise PrefetchRefusedError(
                f"Cannot create shared memory of {layout.total} bytes: {error.strerror}."
            ) from error

    def want(self, model: PrefetchedModel, wanted: Sequence[Ranges]) -> list[UnitEntry]:
        """Plan the requested bytes of a model and evict unused models for them.

        Raises:
            PrefetchRefusedError: The bytes do not fit in the budget after eviction.
        """
        units = model.board.new_units(wanted)
        if model.region is None:
            return model.board.want(wanted, units)
        self._make_room(model, sum(unit.size for unit in units))
        entries = model.board.want(wanted, units)
        bases = [file.base for file in model.layout.files]
        pieces = [(bases[unit.file] + a, bases[unit.file] + b) for unit in units for a, b in unit.pieces]
        if pieces:
            self._allocator.allocate(model.region, pieces)
        return entries

    def release(self, model: PrefetchedModel) -> None:
        """Drop one lease; a model without a lease or planned bytes is removed."""
        model.leases -= 1
        model.used = monotonic()
        if not model.leases and not model.board.planned_bytes and not model.evicted:
            self._evict(model)

    def _make_room(self, model: PrefetchedModel, needed: int) -> None:
        if needed > self.budget:
            raise PrefetchRefusedError(
                f"The request needs {needed} bytes, but the prefetcher may hold {self.budget} "
                "(coldstart prefetch stop, then start --memory SIZE)."
            )
        unused = sorted(
            (m for m in self.models.values() if not m.leases and m is not model), key=lambda m: m.used
        )
        while self.used + needed > self.budget and unused:
            self._evict(unused.pop(0))
        if needed and self.used + needed > self.budget:
            raise PrefetchRefusedError(
                f"The request needs {needed} bytes, but models in use hold {self.used} of {self.budget}."
            )

    def _evict(self, model: PrefetchedModel) -> None:
        del self.models[model.key]
        model.evicted = True
        self.settle(model)

    def settle(self, model: PrefetchedModel) -> None:
        """Close an evicted model if no stream writes to it."""
        if model.evicted and not model.flying:
            model.close()
