"""Eviction of models: free device memory for a model that is to start, or after measurements exceed the capacity.

Invariant: memory that draining models will free is counted before another model is evicted.
"""

from __future__ import annotations

from coldstart.host.model_state import Model
from coldstart.host.residents import Residents


def has_room(residents: Residents, model: Model) -> bool:
    """Return whether `model` can start now without an eviction."""
    return residents.wanted(model) <= residents.device.free() and _surplus(residents) <= 0


def free_memory_for(residents: Residents, model: Model, now: float, evict_busy: bool) -> bool:
    """Return whether `model` can start now. Where it cannot, drain victims that free enough memory.

    Models with requests in flight are victims only with `evict_busy`, and only where idle ones do not suffice.
    """
    if has_room(residents, model):
        return True
    need, surplus = residents.wanted(model) - residents.device.free(), _surplus(residents)
    need, surplus = need - residents.leaving(), surplus - residents.draining()
    if need <= 0 and surplus <= 0:
        return False
    for busy in (False, True)[: 1 + evict_busy]:
        candidates = [name for name in residents.may_leave(busy) if name != model.spec.name]
        if surplus > 0:
            candidates = [name for name in candidates if residents.models[name].resident]
        victims = list(residents.policy.victims(candidates, max(need, 1), now))
        if any(_evict(residents, victims, need, surplus, now, stop) for stop in (False, True)):
            break
    return False


def _evict(residents: Residents, victims: list[str], need: int, surplus: int, now: float, stop: bool) -> bool:
    """Drain the victims to their next tier, or until stopped with `stop`, if that frees `need` bytes and `surplus` models."""
    freed = {name: residents.freed(name, stop) for name in victims}
    out = sum(residents.models[name].resident for name in victims)
    if sum(freed.values()) < need or out < surplus:
        return False
    for name in victims:
        residents.drain(residents.models[name], residents.down(name, stop), now)
    return True


def evict_excess(residents: Residents, now: float) -> None:
    """Evict what can be evicted after measurements exceeded the capacity, even if that does not free enough."""
    excess = -residents.device.free() - residents.leaving()
    if excess > 0:
        victims = list(residents.policy.victims(residents.may_leave(), excess, now))
        _evict(residents, victims, 0, 0, now, stop=True)


def _surplus(residents: Residents) -> int:
    """Return by how many models the limit is exceeded if one more starts."""
    most = residents.settings.max_residents
    return 0 if most is None else residents.count() + 1 - most
