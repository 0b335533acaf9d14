"""The models of one host with their memory: who may leave, for how much, and into which tier.

Invariant: a model in use, pinned, starting or already leaving is never among those that may leave; the policy hears of
every load and every eviction once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coldstart.errors import UsageError
from coldstart.host.memory_accounts import MemoryAccount
from coldstart.host.model_state import Model, State
from coldstart.host.policies import ModelCost, make
from coldstart.host.specification import AWAKE, HostSettings, ModelSpec, Tier

# What the host itself holds is booked under a name that no model has.
_OWN = ""


class Residents:
    """Models by name, two memory accounts and the policy."""

    def __init__(self, specs: Iterable[ModelSpec], settings: HostSettings) -> None:
        self.settings, specs = settings, tuple(specs)
        _check(specs, settings)
        self.models = {spec.name: Model(spec) for spec in specs}
        self.device, self.beside = MemoryAccount(settings.memory), MemoryAccount(settings.host_memory)
        self.costs: dict[str, ModelCost] = {}
        self.policy = make(settings.policy, self.costs, settings.memory)
        self.pinned: list[str] = []
        self._retiring = False
        self._draining: dict[str, Model] = {}
        self._starting: set[str] = set()
        self._reprice()

    def _reprice(self) -> None:
        self.pinned = [name for name, model in self.models.items() if model.spec.pinned]
        for model in self.models.values():
            self.price(model)

    def configure(self, specs: Iterable[ModelSpec], settings: HostSettings, now: float) -> list[str]:
        """The models and limits from now on; the names of models that are to go.

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
                self.models[name] = Model(spec)
        gone = [name for name in self.models if name not in named]
        for name in gone:
            self.models[name].retired = True
        self._retiring = bool(gone)
        self._reprice()
        return gone

    def _resettle(self, settings: HostSettings, now: float) -> None:
        """Other limits. A policy for another capacity, or another policy, begins with what is resident now."""
        before, self.settings = self.settings, settings
        self.device.capacity, self.beside.capacity = settings.memory, settings.host_memory
        if (before.policy, before.memory) == (settings.policy, settings.memory):
            return
        self.policy = make(settings.policy, self.costs, settings.memory)
        for name, model in self.models.items():
            if self.device.reserved(name) and model.state is not State.DRAINING:
                self.policy.requested(name, now, False)
                self.policy.loaded(name, now)

    def unsettled(self) -> bool:
        """Whether more is held than there is, or something is left of a model that is to go."""
        return self.device.free() < 0 or self._retiring

    def forget_retired(self) -> None:
        """Models of which nothing is left."""
        done = [n for n, m in self.models.items() if m.retired and m.state in (State.STOPPED, State.FAILED)]
        for name in done:
            del self.models[name], self.costs[name]
        self._retiring = any(model.retired for model in self.models.values())
        self.pinned = [name for name in self.pinned if name in self.models]

    def requested(self, model: Model, now: float) -> None:
        name = model.spec.name
        holds = self.device.reserved(name) > 0 and model.state is not State.DRAINING
        self.policy.requested(name, now, holds)

    def count(self) -> int:
        return sum(model.resident for model in self.models.values())

    def starting(self) -> int:
        return len(self._starting)

    def draining(self) -> int:
        return len(self._draining)

    def on_the_way_out(self) -> list[Model]:
        return list(self._draining.values())

    def most_for(self, model: Model) -> int:
        """Device bytes that the model could have if all others that may leave had left."""
        others = (self.models[name] for name in self.pinned if name != model.spec.name)
        return self.device.capacity - sum(other.observed.memory for other in others)

    def kept(self) -> int:
        """Device bytes of the host's own warm process."""
        return self.device.reserved(_OWN)

    def keep(self, memory: int) -> None:
        """It holds so many bytes; 0: there is none."""
        self.device.record(_OWN, memory)

    def crowded_out(self, model: Model) -> bool:
        """Whether the model fits only without the host's own process."""
        memory, most = model.observed.memory, self.most_for(model)
        return most - self.kept() < memory <= most

    def wanted(self, model: Model) -> int:
        """Device bytes that serving would take beyond what the model holds."""
        return model.observed.memory - self.device.reserved(model.spec.name)

    def leaving(self) -> int:
        """Device bytes that models under way out will free."""
        return sum(self._freed(m, m.target) for m in self._draining.values() if m.target is not None)

    def down(self, name: str, stop: bool = False) -> Tier:
        """Where the model would go: its next step down, or all the way."""
        model = self.models[name]
        return model.spec.tiers[-1] if stop else self.next_down(model)

    def freed(self, name: str, stop: bool = False) -> int:
        """Device bytes that this would free."""
        return self._freed(self.models[name], self.down(name, stop))

    def _freed(self, model: Model, target: Tier) -> int:
        return max(0, self.device.reserved(model.spec.name) - model.observed.held(target))

    def price(self, model: Model) -> None:
        """What the policy is to think of it: the bytes of its next step down, and what that costs later."""
        top, down = self._top(model), self.next_down(model)
        freed = model.observed.held(top) - model.observed.held(down)
        lost = model.observed.penalty_s(down) - model.observed.penalty_s(top)
        self.costs[model.spec.name] = ModelCost(max(1, freed), max(1e-6, lost))

    def _top(self, model: Model) -> Tier:
        return model.tier if model.state is State.ASLEEP else model.spec.tiers[0]

    def next_down(self, model: Model) -> Tier:
        """The tier of the quickest return that frees device memory and whose host memory there is."""
        tiers, top = model.spec.tiers, self._top(model)
        held, below = model.observed.held(top), tiers[tiers.index(top) + 1 :]
        room = self.beside.free() + self.beside.reserved(model.spec.name)
        fits = (t for t in below if t.host_memory <= room and model.observed.held(t) < held)
        return next(fits, tiers[-1])

    def may_leave(self, busy: bool = False) -> list[str]:
        """Models whose leaving would free device memory now; with `busy` those in use too."""
        ready, asleep, held = State.READY, State.ASLEEP, self.device.reserved
        return [
            name
            for name, model in self.models.items()
            if (model.state is ready and (busy or not model.in_flight) and not model.spec.pinned)
            or (model.state is asleep and held(name))
        ]

    def start(self, model: Model, now: float) -> Tier:
        """Take the memory and begin; the tier that it starts from."""
        known = self.device.reserved(model.spec.name) > 0
        self.device.reserve(model.spec.name, model.observed.memory)
        model.start(now)
        self._starting.add(model.spec.name)
        self.price(model)
        if not known:
            self.policy.loaded(model.spec.name, now)
        return model.tier

    def drain(self, model: Model, target: Tier, now: float) -> None:
        self.policy.evicted(model.spec.name, now)
        model.drain(target, now)
        self._draining[model.spec.name] = model
        # What it holds there goes only when it has left.
        self._book_beside(model, max(self.beside.reserved(model.spec.name), target.host_memory))

    def _book_beside(self, model: Model, size: int) -> None:
        """The room beside the device decides into which tier others may go, and so what they cost."""
        if size != self.beside.reserved(model.spec.name):
            self.beside.reserve(model.spec.name, size)
            self._reprice()

    def left(self, model: Model, now: float) -> None:
        model.left(now)
        self._draining.pop(model.spec.name, None)
        self._book_beside(model, model.tier.host_memory)
        self.device.record(model.spec.name, model.observed.held(model.tier))
        self.price(model)
        if self.device.reserved(model.spec.name):
            self.policy.loaded(model.spec.name, now)

    def ready(self, model: Model, now: float, seconds: float, memory: int | None) -> None:
        model.ready(now, seconds, memory)
        self._starting.discard(model.spec.name)
        self._book_beside(model, 0)
        self.measured(model, model.observed.memory)

    def measured(self, model: Model, memory: int, tier: str = AWAKE) -> None:
        """Book what it really holds, be it more than there is; for a tier that it is not in, remember it."""
        if tier not in {one.name for one in model.spec.tiers}:
            return
        model.observed.measured(tier, memory)
        if model.state is State.READY or (model.state is State.ASLEEP and model.tier.name == tier):
            self.device.record(model.spec.name, model.observed.held(model.tier))
        self.price(model)

    def failed(self, model: Model, reason: str, now: float) -> None:
        if model.state is not State.DRAINING:
            self.policy.evicted(model.spec.name, now)
        model.fail(reason, now, self.settings.backoff_s, self.settings.backoff_max_s)
        model.in_flight.clear()
        self._draining.pop(model.spec.name, None)
        self._starting.discard(model.spec.name)
        self.device.record(model.spec.name, 0)
        self._book_beside(model, 0)
        self.price(model)


def _check(specs: tuple[ModelSpec, ...], settings: HostSettings) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise UsageError(
            f"models: {', '.join(twice)} is given twice", hint="give each model a name of its own"
        )
    pinned = sum(spec.tiers[0].memory for spec in specs if spec.pinned)
    if pinned > settings.memory:
        hint = "pin fewer models, or give the host more memory"
        raise UsageError(f"pinned models need {pinned} bytes, the host has {settings.memory}", hint=hint)
