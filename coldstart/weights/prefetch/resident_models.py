"""The models in memory, within a budget: what no client holds makes room, longest unused first.

Equation: the sum over models of max(planned, allocated) bytes is at most the budget; a request that does not fit after
eviction is refused before anything is planned for it.
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
from coldstart.weights.prefetch.range_source import normal
from coldstart.weights.prefetch.region import Allocator
from coldstart.weights.prefetch.schedule import UnitEntry


class Memory:
    """Models by the digest of their source and plan."""

    def __init__(self, settings: configuration.PrefetchSettings) -> None:
        self.models: dict[str, PrefetchedModel] = {}
        self._settings = settings
        self._budget: int | None = settings.memory_bytes
        self._allocator = Allocator()

    @property
    def budget(self) -> int:
        """Bytes that may be held; measured when first needed, if it was not given."""
        if self._budget is None:
            self._budget = configuration.budget(self._settings)
        return self._budget

    @property
    def used(self) -> int:
        """Bytes that are held or promised."""
        return sum(model.charged for model in self.models.values())

    def find(self, source: str, plan: bytes, environment: Mapping[str, str]) -> PrefetchedModel:
        """The model of a source and a plan (its JSON), made if unknown. Raises PrefetchRefusedError."""
        address = normal(source)
        key = hashlib.sha256(address.encode() + b"\n" + plan).hexdigest()
        if key not in self.models:
            try:
                document = json.loads(plan)
            except (ValueError, RecursionError) as error:
                raise PrefetchRefusedError(f"The weights plan is no JSON: {error}.") from error
            if not isinstance(document, dict):
                raise PrefetchRefusedError("The weights plan is no JSON object.")
            self._add(key, address, environment, region_layout.read(document))
        self.models[key].newest(environment)
        return self.models[key]

    def _add(
        self, key: str, address: str, environment: Mapping[str, str], layout: region_layout.RegionLayout
    ) -> None:
        try:
            self.models[key] = PrefetchedModel(key, address, environment, layout)
        except OSError as error:
            raise PrefetchRefusedError(
                f"No shared memory for {layout.total} bytes: {error.strerror}."
            ) from error

    def want(self, model: PrefetchedModel, wanted: Sequence[Ranges]) -> list[UnitEntry]:
        """Plan what is wanted of a model, making room. Raises PrefetchRefusedError when there is none to make."""
        units = model.board.new_units(wanted)
        if model.region is None:
            return model.board.want(wanted, units)
        self._make_room(model, sum(unit.size for unit in units))
        entries = model.board.want(wanted, units)
        bases = [file.base for file in model.layout.files]
        pieces = [(bases[unit.file] + a, bases[unit.file] + b) for unit in units for a, b in unit.pieces]
        if pieces:
            self._allocator.ahead(model.region, pieces)
        return entries

    def release(self, model: PrefetchedModel) -> None:
        """One lease less; a model that holds nothing is forgotten with its last one."""
        model.leases -= 1
        model.used = monotonic()
        if not model.leases and not model.board.planned_bytes and not model.evicted:
            self._evict(model)

    def _make_room(self, model: PrefetchedModel, needed: int) -> None:
        if needed > self.budget:
            raise PrefetchRefusedError(
                f"{needed} bytes are wanted, the prefetcher may hold {self.budget} "
                "(coldstart prefetch stop, then start --memory-bytes N)."
            )
        unused = sorted(
            (m for m in self.models.values() if not m.leases and m is not model), key=lambda m: m.used
        )
        while self.used + needed > self.budget and unused:
            self._evict(unused.pop(0))
        if needed and self.used + needed > self.budget:
            raise PrefetchRefusedError(
                f"{needed} bytes are wanted, {self.used} of {self.budget} are held by models in use."
            )

    def _evict(self, model: PrefetchedModel) -> None:
        del self.models[model.key]
        model.evicted = True
        self.settle(model)

    def settle(self, model: PrefetchedModel) -> None:
        """Close an evicted model once no stream writes to it any longer."""
        if model.evicted and not model.flying:
            model.close()
