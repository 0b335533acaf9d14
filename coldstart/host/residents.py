"""Memory of a host's models: reservations, eviction candidates, and the tiers to which evicted models move.

Invariants: a model that is pinned, starting or draining is never an eviction candidate. The policy is notified exactly once
of each load and each eviction. `used` of an account is the sum of its reservations, and exceeds the capacity only if a model
was measured to use more memory than was reserved for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import nlargest

from coldstart.errors import UsageError
from coldstart.host.events import Failure
from coldstart.host.model_state import Model, ModelState
from coldstart.host.policies import ModelCost, create_policy
from coldstart.host.specification import HostSettings, ModelSpec, Tier
from coldstart.units import format_memory

Place = int | None
"""Number of a device. None means all devices together."""


def count_device_bytes(size: int, devices: tuple[int, ...], place: Place) -> int:
    """Return how many of a model's `size` bytes are on `place` if they are spread evenly over `devices`, as with TP."""
    if place is None:
        return size
    return -(-size // len(devices)) if place in devices else 0


def divide_memory(limit: int, sizes: Sequence[tuple[int, int]], residents: int) -> list[int]:
    """Return how many bytes each model gets, so that as many models as possible, up to `residents`, fit into `limit`.

    `sizes` are the least and the most bytes of each model. Any models of this number fit together, whichever they are. All
    models get the same number of bytes more than their least, but not more than their most.
    """
    fitting = [(least, most) for least, most in sizes if least <= limit]

    def count_bytes(number: int, more: int) -> int:
        return sum(nlargest(number, (min(most, least + more) for least, most in fitting)))

    number = next((n for n in range(min(len(fitting), residents), 0, -1) if count_bytes(n, 0) <= limit), 0)
    more = bisect_right(range(limit + 1), limit, key=lambda more: count_bytes(number, more)) - 1
    return [min(most, least + more) if least <= limit else most for least, most in sizes]


def share_memory(specs: tuple[ModelSpec, ...], settings: HostSettings) -> dict[str, int]:
    """Return the device memory in bytes of each model, in total, with which as many as possible fit on their devices."""
    memory = {spec.name: spec.tiers[0].memory for spec in specs}
    for place in (*sorted({number for spec in specs for number in spec.devices}), None):
        models = [spec for spec in specs if place is None or place in spec.devices]
        limit = settings.memory if place is None else settings.bytes_per_device
        most = [count_device_bytes(memory[spec.name], spec.devices, place) for spec in models]
        least = [count_device_bytes(spec.least_memory, spec.devices, place) for spec in models]
        sizes = [(low or high, high) for low, high in zip(least, most, strict=True)]
        divided = divide_memory(limit, sizes, settings.max_residents or len(models))
        for spec, size in zip(models, divided, strict=True):
            count = 1 if place is None else len(spec.devices)
            memory[spec.name] = min(memory[spec.name], size * count)
    return memory


class MemoryAccount:
    """Memory reservations of all models, in total and on each device.

    `capacity` is the total in bytes, and `bytes_per_device` is the size of each device. An account of CPU memory has no
    devices.
    """

    def __init__(self, capacity: int, bytes_per_device: int = 0) -> None:
        self.capacity, self.bytes_per_device, self.used = capacity, bytes_per_device, 0
        self._reserved: dict[str, int] = {}
        self._devices: dict[str, tuple[int, ...]] = {}

    def record(self, model: str, size: int) -> None:
        """Set the reservation of `model` to `size` bytes, even if the total then exceeds the capacity."""
        self.used += size - self._reserved.get(model, 0)
        self._reserved[model] = size

    def reserved_bytes(self, model: str, place: Place = None) -> int:
        return count_device_bytes(self._reserved.get(model, 0), self.devices(model), place)

    def limit(self, place: Place) -> int:
        """Return the capacity of a device in bytes, or that of all devices together if `place` is None."""
        return self.capacity if place is None else self.bytes_per_device

    def free(self, place: Place = None) -> int:
        """Return the number of unreserved bytes, which is negative if the measured memory exceeds the capacity."""
        if place is None:
            return self.capacity - self.used
        return self.bytes_per_device - sum(self.reserved_bytes(model, place) for model in self._devices)

    def place(self, model: str, devices: tuple[int, ...]) -> None:
        """Assign a model to devices, unless it still has memory reserved on its current devices."""
        if not self.reserved_bytes(model):
            self._devices[model] = devices

    def devices(self, model: str) -> tuple[int, ...]:
        return self._devices.get(model, ())

    def list_places(self) -> list[Place]:
        """Return the places with a memory limit: None for all devices together, and each device that models are assigned to."""
        return [None, *dict.fromkeys(number for devices in self._devices.values() for number in devices)]


# Account name of the host's own memory; no model has this name.
_TEMPLATE_ACCOUNT = ""


class Residents:
    """Memory manager of a host: its models, the memory that they reserve, and the eviction policy."""

    def __init__(self, specs: Iterable[ModelSpec], settings: HostSettings, template_bytes: int = 0) -> None:
        self.settings, self._template_bytes, specs = settings, template_bytes, tuple(specs)
        _check_specs(specs, settings)
        self.models = {spec.name: Model(spec) for spec in specs}
        self.device = MemoryAccount(settings.memory, settings.bytes_per_device)
        self.host_memory = MemoryAccount(settings.host_memory)
        self.costs: dict[str, ModelCost] = {}
        self.policy = create_policy(settings.policy, self.costs)
        self.pinned: list[str] = []
        self._draining: dict[str, Model] = {}
        self._reserve_template()
        self._update_costs()

    def _reserve_template(self) -> None:
        self.device.record(_TEMPLATE_ACCOUNT, self._template_bytes if self.settings.runtime_template else 0)

    def _update_costs(self) -> None:
        self.pinned = [n for n, m in self.models.items() if m.spec.pinned and not m.is_retired]
        for model in self.models.values():
            self.update_cost(model)

    def configure(self, specs: Iterable[ModelSpec], settings: HostSettings, now: float) -> list[str]:
        """Apply a new configuration, and return the names of the models that are no longer configured.

        Raises:
            UsageError: The configuration is invalid, and the previous one remains in effect.
        """
        specs = tuple(specs)
        _check_specs(specs, settings)
        self._apply_settings(settings, now)
        named = {spec.name: spec for spec in specs}
        for name, spec in named.items():
            if name in self.models:
                self.models[name].apply_spec(spec)
            else:
                self.models[name] = Model(spec, state_since=now)
        gone = [name for name in self.models if name not in named]
        for name in gone:
            self.models[name].is_retired = True
        self._update_costs()
        return gone

    def _apply_settings(self, settings: HostSettings, now: float) -> None:
        """Apply new settings. If the policy changed, create it and register the resident models."""
        before, self.settings = self.settings, settings
        self.device.capacity, self.device.bytes_per_device = settings.memory, settings.bytes_per_device
        self.host_memory.capacity = settings.host_memory
        self._reserve_template()
        if before.policy == settings.policy:
            return
        self.policy = create_policy(settings.policy, self.costs)
        for name, model in self.models.items():
            if self.device.reserved_bytes(name) and model.state is not ModelState.DRAINING:
                self.policy.record_request(name, now, False)
                self.policy.record_load_start(name, now)

    def delete_retired(self) -> None:
        """Delete retired models that have stopped."""
        done = [
            n
            for n, m in self.models.items()
            if m.is_retired and m.state in (ModelState.STOPPED, ModelState.FAILED)
        ]
        for name in done:
            del self.models[name], self.costs[name]

    def record_request(self, model: Model, now: float) -> None:
        name = model.spec.name
        holds = self.device.reserved_bytes(name) > 0 and model.state is not ModelState.DRAINING
        self.policy.record_request(name, now, holds)

    def restarts_by_itself(self, model: Model) -> bool:
        """Return whether the host restarts the model without a request, because it is pinned or the default model."""
        return model.spec.pinned or model.spec.name == self.settings.default_model

    def count_starting(self) -> int:
        return sum(model.state is ModelState.STARTING for model in self.models.values())

    def list_draining(self) -> list[Model]:
        return list(self._draining.values())

    def find_max_memory(self, model: Model) -> int:
        """Return the device memory in bytes that the model can use after all other models that are not pinned are evicted.

        The memory of the host's template process is not available to the model.
        """
        others = [self.models[name] for name in self.pinned if name != model.spec.name]
        devices = model.spec.devices
        most = [self.device.capacity - self.template_memory() - sum(one.observed.memory for one in others)]
        for number in devices:
            taken = sum(
                count_device_bytes(other.observed.memory, other.spec.devices, number) for other in others
            )
            most.append(len(devices) * (self.device.bytes_per_device - taken))
        return min(most)

    def template_memory(self) -> int:
        """Return the device bytes reserved for the host's template process."""
        return self.device.reserved_bytes(_TEMPLATE_ACCOUNT)

    def fits(self, model: Model) -> bool:
        """Return whether the model fits after all other models that are not pinned are evicted."""
        return model.observed.memory <= self.find_max_memory(model)

    def find_shortages(self, model: Model) -> dict[Place, int]:
        """Return how many bytes are missing to start the model, by device. The key None stands for all devices together."""
        name, memory = model.spec.name, model.observed.memory
        self.device.place(name, model.spec.devices)
        devices, device = self.device.devices(name), self.device
        return {
            place: count_device_bytes(memory, devices, place)
            - device.reserved_bytes(name, place)
            - device.free(place)
            for place in (*devices, None)
        }

    def find_draining_bytes(self, place: Place = None) -> int:
        """Return the bytes that draining models will free on a device, or on all devices together."""
        return sum(
            self._count_freed_bytes(m, m.drain_target, place)
            for m in self._draining.values()
            if m.drain_target is not None
        )

    def find_eviction_tier(self, name: str, stop: bool = False) -> Tier:
        """Return the tier to which an eviction moves the model: the next lower tier, or `stopped` if `stop` is set."""
        model = self.models[name]
        return model.spec.tiers[-1] if stop else self.find_lower_tier(model)

    def find_freed_bytes(self, name: str, stop: bool = False, place: Place = None) -> int:
        """Return how many bytes on `place` are freed if the model moves to the tier that `find_eviction_tier` returns."""
        return self._count_freed_bytes(self.models[name], self.find_eviction_tier(name, stop), place)

    def _count_freed_bytes(self, model: Model, target: Tier, place: Place) -> int:
        name, rest = model.spec.name, model.observed.memory_in(target)
        return max(
            0,
            self.device.reserved_bytes(name, place)
            - count_device_bytes(rest, self.device.devices(name), place),
        )

    def update_cost(self, model: Model) -> None:
        """Update the model's eviction cost: the bytes that its next lower tier frees, and the start time that it adds."""
        top, down = self._find_current_tier(model), self.find_lower_tier(model)
        freed = model.observed.memory_in(top) - model.observed.memory_in(down)
        lost = model.observed.penalty_s(down) - model.observed.penalty_s(top)
        self.costs[model.spec.name] = ModelCost(max(1, freed), max(1e-6, lost))

    def _find_current_tier(self, model: Model) -> Tier:
        return model.tier if model.state is ModelState.ASLEEP else model.spec.tiers[0]

    def find_lower_tier(self, model: Model) -> Tier:
        """Return the lower tier with the shortest penalty that frees device memory and whose CPU memory is available."""
        tiers, top = model.spec.tiers, self._find_current_tier(model)
        held, below = model.observed.memory_in(top), tiers[tiers.index(top) + 1 :]
        room = self.host_memory.free() + self.host_memory.reserved_bytes(model.spec.name)
        fits = (t for t in below if t.host_memory <= room and model.observed.memory_in(t) < held)
        return next(fits, tiers[-1])

    def list_evictable(self, busy: bool = False) -> list[str]:
        """Return the models whose eviction would free device memory now. `busy` includes models with running requests."""
        ready, asleep, held = ModelState.READY, ModelState.ASLEEP, self.device.reserved_bytes
        return [
            name
            for name, model in self.models.items()
            if (model.state is ready and (busy or not model.in_flight) and not model.spec.pinned)
            or (model.state is asleep and held(name))
        ]

    def start(self, model: Model, now: float) -> Tier:
        """Reserve the model's memory and mark the model as starting. Return the tier from which it starts."""
        known = self.device.reserved_bytes(model.spec.name) > 0
        self.device.record(model.spec.name, model.observed.memory)
        model.start(now)
        self.update_cost(model)
        if not known:
            self.policy.record_load_start(model.spec.name, now)
        return model.tier

    def drain(self, model: Model, target: Tier, now: float, why: str, evicted_for: str | None = None) -> None:
        self.policy.record_eviction(model.spec.name, now)
        model.drain(target, now, why, evicted_for)
        self._draining[model.spec.name] = model
        # The CPU memory is freed only after the tier change.
        self._reserve_host_memory(
            model, max(self.host_memory.reserved_bytes(model.spec.name), target.host_memory)
        )

    def _reserve_host_memory(self, model: Model, size: int) -> None:
        """Reserve CPU memory for a model. Update all costs, because they depend on the free CPU memory."""
        if size != self.host_memory.reserved_bytes(model.spec.name):
            self.host_memory.record(model.spec.name, size)
            self._update_costs()

    def complete_tier_change(self, model: Model, now: float) -> None:
        model.complete_tier_change(now)
        self._draining.pop(model.spec.name, None)
        self._reserve_host_memory(model, model.tier.host_memory)
        self.device.record(model.spec.name, model.observed.memory_in(model.tier))
        self.update_cost(model)
        if self.device.reserved_bytes(model.spec.name):
            self.policy.record_load_start(model.spec.name, now)

    def record_ready(self, model: Model, now: float, seconds: float) -> None:
        model.record_ready(now, seconds)
        self._reserve_host_memory(model, 0)
        self.device.record(model.spec.name, model.observed.memory)
        self.update_cost(model)

    def record_memory(self, model: Model, memory: int) -> None:
        """Record the measured device memory of a ready model in bytes, even if it exceeds the capacity."""
        model.observed.record_memory(memory)
        self._reserve_servers(model)
        self.update_cost(model)

    def has_room_for_second(self, model: Model) -> bool:
        """Return whether the memory for a second server of a ready model is free on its devices."""
        devices = self.device.devices(model.spec.name)
        return all(
            count_device_bytes(model.observed.memory, devices, place) <= self.device.free(place)
            for place in (*devices, None)
        )

    def reserve_replacement(self, model: Model) -> None:
        """Reserve memory for a second server of a ready model."""
        model.replacement_bytes = model.observed.memory
        self._reserve_servers(model)

    def release_replacement(self, model: Model) -> None:
        """Release the memory of one of the two servers of a model."""
        model.replacement_bytes = 0
        self._reserve_servers(model)

    def _reserve_servers(self, model: Model) -> None:
        """Reserve the memory of a running model's server, and of a second server if there is one."""
        self.device.record(model.spec.name, model.observed.memory + model.replacement_bytes)

    def record_failure(self, model: Model, reason: Failure, now: float, external: bool) -> None:
        if model.state is not ModelState.DRAINING:
            self.policy.record_eviction(model.spec.name, now)
        model.record_failure(
            reason, now, self.settings.backoff_s, self.settings.backoff_max_s, external=external
        )
        model.in_flight.clear()
        self._draining.pop(model.spec.name, None)
        self.device.record(model.spec.name, 0)
        self._reserve_host_memory(model, 0)
        self.update_cost(model)


def _check_specs(specs: tuple[ModelSpec, ...], settings: HostSettings) -> None:
    numbers = {number for spec in specs for number in spec.devices}
    for place, limit in (
        (None, settings.memory),
        *((number, settings.bytes_per_device) for number in numbers),
    ):
        pinned = sum(
            count_device_bytes(spec.tiers[0].memory, spec.devices, place) for spec in specs if spec.pinned
        )
        if pinned > limit:
            holder = "the host" if place is None else f"device {place}"
            raise UsageError(
                f"the pinned models need {format_memory(pinned)}, but {holder} has only {format_memory(limit)}",
                hint="pin fewer models, or raise the memory limit of the host",
            )
