"""Models of one host with their memory: which can be evicted, how much memory that frees, and into which tier they go.

Invariants: a model that is in use, pinned, starting or draining is never an eviction candidate; the policy is notified
of every load and every eviction once. `used` of an account is the sum of its reservations, and exceeds the capacity only
if a model was measured to hold more than was reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coldstart.errors import UsageError
from coldstart.host.events import Failure
from coldstart.host.model_state import Model, State
from coldstart.host.policies import ModelCost, make
from coldstart.host.specification import HostSettings, ModelSpec, Tier

Place = int | None
"""A device, or None: all devices together."""


def share(size: int, devices: tuple[int, ...], place: Place) -> int:
    """Return the bytes of `size` in a place; on `devices` the size is spread evenly, as vLLM's tensor parallelism does."""
    if place is None:
        return size
    return -(-size // len(devices)) if place in devices else 0


class Memory:
    """Bytes reserved by each model on all devices together, and so on each device that it is placed on.

    All devices together hold `capacity` bytes, and each of them `each`. Host memory has no devices.
    """

    def __init__(self, capacity: int, each: int = 0) -> None:
        self.capacity, self.each, self.used = capacity, each, 0
        self._reserved: dict[str, int] = {}
        self._devices: dict[str, tuple[int, ...]] = {}

    def record(self, model: str, size: int) -> None:
        """Set the bytes of `model`, whether they fit or not."""
        self.used += size - self._reserved.get(model, 0)
        self._reserved[model] = size

    def reserved(self, model: str, place: Place = None) -> int:
        return share(self._reserved.get(model, 0), self.devices(model), place)

    def limit(self, place: Place) -> int:
        """Return the bytes that all models may hold in a place."""
        return self.capacity if place is None else self.each

    def free(self, place: Place = None) -> int:
        """Return the free bytes; negative if measurements exceed the capacity."""
        if place is None:
            return self.capacity - self.used
        return self.each - sum(self.reserved(model, place) for model in self._devices)

    def place(self, model: str, devices: tuple[int, ...]) -> None:
        """Set the devices of a model, which remain as they are while it holds memory."""
        if not self.reserved(model):
            self._devices[model] = devices

    def devices(self, model: str) -> tuple[int, ...]:
        return self._devices.get(model, ())

    def list_places(self) -> list[Place]:
        """Return all places on which a model was placed."""
        return [None, *dict.fromkeys(number for devices in self._devices.values() for number in devices)]


# Account name of the host's own memory; no model has this name.
_OWN = ""


class Residents:
    """Models by name, two accounts of memory and the policy."""

    def __init__(self, specs: Iterable[ModelSpec], settings: HostSettings, template_bytes: int = 0) -> None:
        self.settings, self._template_bytes, specs = settings, template_bytes, tuple(specs)
        _check(specs, settings)
        self.models = {spec.name: Model(spec) for spec in specs}
        self.device = Memory(settings.memory, settings.each_device)
        self.beside = Memory(settings.host_memory)
        self.costs: dict[str, ModelCost] = {}
        self.policy = make(settings.policy, self.costs, settings.memory)
        self.pinned: list[str] = []
        self._retiring = False
        self._draining: dict[str, Model] = {}
        self._reserve_template()
        self._reprice()

    def _reserve_template(self) -> None:
        self.device.record(_OWN, self._template_bytes if self.settings.runtime_template else 0)

    def _reprice(self) -> None:
        self.pinned = [name for name, model in self.models.items() if model.spec.pinned]
        for model in self.models.values():
            self.price(model)

    def configure(self, specs: Iterable[ModelSpec], settings: HostSettings, now: float) -> list[str]:
        """Apply other models and limits; return the names of models that are no longer configured.

        Raises UsageError, and changes nothing then.
        """
        specs = tuple(specs)
        _check(specs, settings)
        self._resettle(settings, now)
        named = {spec.name: spec for spec in specs}
        for name, spec in named.items():
            if name in self.models:
                self.models[name].respecify(spec)
            else:
                self.models[name] = Model(spec, entered=now)
        gone = [name for name in self.models if name not in named]
        for name in gone:
            self.models[name].retired = True
        self._retiring = bool(gone)
        self._reprice()
        return gone

    def _resettle(self, settings: HostSettings, now: float) -> None:
        """Apply other limits.

        A changed policy or capacity begins with a new policy object and the models that are resident now.
        """
        before, self.settings = self.settings, settings
        self.device.capacity, self.device.each = settings.memory, settings.each_device
        self.beside.capacity = settings.host_memory
        self._reserve_template()
        if (before.policy, before.memory) == (settings.policy, settings.memory):
            return
        self.policy = make(settings.policy, self.costs, settings.memory)
        for name, model in self.models.items():
            if self.device.reserved(name) and model.state is not State.DRAINING:
                self.policy.requested(name, now, False)
                self.policy.loaded(name, now)

    def unsettled(self) -> bool:
        """Return whether reserved memory exceeds the capacity, or a retired model has not stopped yet."""
        overfull = any(self.device.free(place) < 0 for place in self.device.list_places())
        return overfull or self._retiring

    def forget_retired(self) -> None:
        """Delete the retired models that have stopped."""
        done = [n for n, m in self.models.items() if m.retired and m.state in (State.STOPPED, State.FAILED)]
        for name in done:
            del self.models[name], self.costs[name]
        self._retiring = any(model.retired for model in self.models.values())
        self.pinned = [name for name in self.pinned if name in self.models]

    def requested(self, model: Model, now: float) -> None:
        name = model.spec.name
        holds = self.device.reserved(name) > 0 and model.state is not State.DRAINING
        self.policy.requested(name, now, holds)

    def returns(self, model: Model) -> bool:
        """Return whether the host starts the model again by itself: it is pinned, or the default model."""
        return model.spec.pinned or model.spec.name == self.settings.default_model

    def count(self) -> int:
        return sum(model.resident for model in self.models.values())

    def starting(self) -> int:
        return sum(model.state is State.STARTING for model in self.models.values())

    def draining(self) -> list[Model]:
        return list(self._draining.values())

    def max_memory(self, model: Model) -> int:
        """Return the device bytes that the model could have if all other models that are not pinned were evicted.

        The host's own template process keeps its memory.
        """
        others = [self.models[name] for name in self.pinned if name != model.spec.name]
        devices = model.spec.devices
        most = [self.device.capacity - self.template_memory() - sum(one.observed.memory for one in others)]
        for number in devices:
            taken = sum(share(other.observed.memory, other.spec.devices, number) for other in others)
            most.append(len(devices) * (self.device.each - taken))
        return min(most)

    def template_memory(self) -> int:
        """Return the device bytes of the host's own template process."""
        return self.device.reserved(_OWN)

    def fits(self, model: Model) -> bool:
        """Return whether the model can start once all models that are not pinned are evicted."""
        return model.observed.memory <= self.max_memory(model)

    def find_shortages(self, model: Model) -> dict[Place, int]:
        """Return the bytes that serving the model takes beyond the free ones: on each of its devices, and together."""
        name, memory = model.spec.name, model.observed.memory
        self.device.place(name, model.spec.devices)
        devices, device = self.device.devices(name), self.device
        return {
            place: share(memory, devices, place) - device.reserved(name, place) - device.free(place)
            for place in (*devices, None)
        }

    def leaving(self, place: Place = None) -> int:
        """Return the device bytes that draining models will free in a place."""
        return sum(self._freed(m, m.target, place) for m in self._draining.values() if m.target is not None)

    def down(self, name: str, stop: bool = False) -> Tier:
        """Return the tier that the model would go to: the next lower tier, or `stopped` with `stop`."""
        model = self.models[name]
        return model.spec.tiers[-1] if stop else self.next_down(model)

    def freed(self, name: str, stop: bool = False, place: Place = None) -> int:
        """Return the device bytes that the eviction of the model would free in a place."""
        return self._freed(self.models[name], self.down(name, stop), place)

    def _freed(self, model: Model, target: Tier, place: Place) -> int:
        name, rest = model.spec.name, model.observed.memory_in(target)
        return max(0, self.device.reserved(name, place) - share(rest, self.device.devices(name), place))

    def price(self, model: Model) -> None:
        """Update the model's cost for the policy: the bytes that the next lower tier frees, and the added start time."""
        top, down = self._top(model), self.next_down(model)
        freed = model.observed.memory_in(top) - model.observed.memory_in(down)
        lost = model.observed.penalty_s(down) - model.observed.penalty_s(top)
        self.costs[model.spec.name] = ModelCost(max(1, freed), max(1e-6, lost))

    def _top(self, model: Model) -> Tier:
        return model.tier if model.state is State.ASLEEP else model.spec.tiers[0]

    def next_down(self, model: Model) -> Tier:
        """Return the tier with the shortest penalty that frees device memory and whose host memory is available."""
        tiers, top = model.spec.tiers, self._top(model)
        held, below = model.observed.memory_in(top), tiers[tiers.index(top) + 1 :]
        room = self.beside.free() + self.beside.reserved(model.spec.name)
        fits = (t for t in below if t.host_memory <= room and model.observed.memory_in(t) < held)
        return next(fits, tiers[-1])

    def may_leave(self, busy: bool = False) -> list[str]:
        """Return the models whose eviction would free device memory now; with `busy` including those in use."""
        ready, asleep, held = State.READY, State.ASLEEP, self.device.reserved
        return [
            name
            for name, model in self.models.items()
            if (model.state is ready and (busy or not model.in_flight) and not model.spec.pinned)
            or (model.state is asleep and held(name))
        ]

    def start(self, model: Model, now: float) -> Tier:
        """Reserve the memory and start the model; return the tier that it starts from."""
        known = self.device.reserved(model.spec.name) > 0
        self.device.record(model.spec.name, model.observed.memory)
        model.start(now)
        self.price(model)
        if not known:
            self.policy.loaded(model.spec.name, now)
        return model.tier

    def drain(self, model: Model, target: Tier, now: float, why: str, evicted_for: str | None = None) -> None:
        self.policy.evicted(model.spec.name, now)
        model.drain(target, now, why, evicted_for)
        self._draining[model.spec.name] = model
        # The host memory is freed only after the model has left.
        self._book_beside(model, max(self.beside.reserved(model.spec.name), target.host_memory))

    def _book_beside(self, model: Model, size: int) -> None:
        """Reserve host memory, which decides the tiers available to other models, and so their costs."""
        if size != self.beside.reserved(model.spec.name):
            self.beside.record(model.spec.name, size)
            self._reprice()

    def complete_leave(self, model: Model, now: float) -> None:
        model.complete_leave(now)
        self._draining.pop(model.spec.name, None)
        self._book_beside(model, model.tier.host_memory)
        self.device.record(model.spec.name, model.observed.memory_in(model.tier))
        self.price(model)
        if self.device.reserved(model.spec.name):
            self.policy.loaded(model.spec.name, now)

    def ready(self, model: Model, now: float, seconds: float) -> None:
        model.ready(now, seconds)
        self._book_beside(model, 0)
        self.device.record(model.spec.name, model.observed.memory)
        self.price(model)

    def measured(self, model: Model, memory: int) -> None:
        """Record the measured bytes of a model that serves, even above the capacity."""
        model.observed.measured(memory)
        self.device.record(model.spec.name, memory)
        self.price(model)

    def failed(self, model: Model, reason: Failure, now: float, external: bool) -> None:
        if model.state is not State.DRAINING:
            self.policy.evicted(model.spec.name, now)
        model.fail(reason, now, self.settings.backoff_s, self.settings.backoff_max_s, external=external)
        model.in_flight.clear()
        self._draining.pop(model.spec.name, None)
        self.device.record(model.spec.name, 0)
        self._book_beside(model, 0)
        self.price(model)


def _check(specs: tuple[ModelSpec, ...], settings: HostSettings) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise UsageError(f"models: {', '.join(twice)} is defined twice", hint="give each model a unique name")
    numbers = {number for spec in specs for number in spec.devices}
    for place, limit in ((None, settings.memory), *((number, settings.each_device) for number in numbers)):
        pinned = sum(share(spec.tiers[0].memory, spec.devices, place) for spec in specs if spec.pinned)
        if pinned > limit:
            holder = "the host" if place is None else f"device {place}"
            hint = "pin fewer models, or give the host more memory"
            raise UsageError(f"pinned models need {pinned} bytes, {holder} has {limit}", hint=hint)
