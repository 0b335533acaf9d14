"""Eviction of models: free device memory for a model that is to start, or after measurements exceed the capacity.

Invariant: memory that draining models will free is counted before another model is evicted.
"""

from __future__ import annotations

from coldstart.host.model_state import Model
from coldstart.host.residents import Place, Residents
from coldstart.units import format_memory


def has_room(residents: Residents, model: Model) -> bool:
    """Return whether `model` can start now without an eviction."""
    return max(residents.find_shortages(model).values()) <= 0 and _surplus(residents) <= 0


def free_memory_for(residents: Residents, model: Model, now: float, evict_busy: bool) -> bool:
    """Return whether `model` can start now. Where it cannot, drain victims that free enough memory.

    Models with requests in flight are victims only with `evict_busy`, and only where idle ones do not suffice.
    """
    if has_room(residents, model):
        return True
    shortages = residents.find_shortages(model)
    needs = {place: need - residents.leaving(place) for place, need in shortages.items()}
    surplus = _surplus(residents) - len(residents.draining())
    if max(needs.values()) <= 0 and surplus <= 0:
        return False
    for busy in (False, True)[: 1 + evict_busy]:
        candidates = [name for name in residents.may_leave(busy) if name != model.spec.name]
        if surplus > 0:
            candidates = [name for name in candidates if residents.models[name].resident]
        victims = _choose(residents, candidates, needs, surplus, now)
        why, name = _explain(residents, model, shortages), model.spec.name
        if any(_evict(residents, victims, needs, surplus, now, why, stop, name) for stop in (False, True)):
            break
    return False


def _explain(residents: Residents, model: Model, shortages: dict[Place, int]) -> str:
    """Return why models are evicted for `model`: the place where most memory is missing, or the limit of their number."""
    place = max(shortages, key=lambda place: shortages[place])
    evicted = f"evicted for {model.spec.name}"
    if shortages[place] <= 0:
        return f"{evicted}: max_residents is {residents.settings.max_residents}"
    where = "" if place is None else f" of device {place}"
    free = residents.device.free(place)
    needed, limit = shortages[place] + free, residents.device.limit(place)
    there = f"{format_memory(free)} of {format_memory(limit)} are free"
    why = f"{evicted}, which needs {format_memory(needed)}{where}: {there}"
    template = residents.template_memory() if place is None else 0
    return f"{why}, and the runtime template has {format_memory(template)}" if template else why


def _choose(
    residents: Residents, candidates: list[str], needs: dict[Place, int], surplus: int, now: float
) -> list[str]:
    """Return the victims: first those that each device needs, then more until all devices together have enough."""
    victims: list[str] = []
    for place, missing in needs.items():
        need = missing - sum(residents.freed(name, place=place) for name in victims)
        if need > 0 or (place is None and not victims and surplus > 0):
            rest = [name for name in candidates if name not in victims]
            victims += _ask(residents, rest, place, need, now)
    return victims


def _ask(residents: Residents, candidates: list[str], place: Place, need: int, now: float) -> list[str]:
    """Return the policy's victims that free `need` bytes in a place. The policy knows only the total of each model."""
    if place is not None:
        candidates = [name for name in candidates if residents.device.reserved(name, place)]
        spread = max((len(residents.device.devices(name)) for name in candidates), default=1)
        # A share is rounded up to a byte.
        need = (need + len(candidates)) * spread
    return list(residents.policy.victims(candidates, max(need, 1), now)) if candidates else []


def _evict(
    residents: Residents,
    victims: list[str],
    needs: dict[Place, int],
    surplus: int,
    now: float,
    why: str,
    stop: bool,
    evicted_for: str | None = None,
) -> bool:
    """Drain the victims to their next tier, or until stopped with `stop`, if that frees the bytes and `surplus` models."""
    out = sum(residents.models[name].resident for name in victims)
    if out < surplus:
        return False
    for place, need in needs.items():
        if sum(residents.freed(name, stop, place) for name in victims) < need:
            return False
    for name in victims:
        residents.drain(residents.models[name], residents.down(name, stop), now, why, evicted_for)
    return True


def evict_excess(residents: Residents, now: float) -> None:
    """Evict what can be evicted after measurements exceeded the capacity, even if that does not free enough."""
    for place in residents.device.list_places():
        excess = -residents.device.free(place) - residents.leaving(place)
        if excess > 0:
            victims = _ask(residents, residents.may_leave(), place, excess, now)
            why = "the memory of the models is above the limit"
            _evict(residents, victims, {}, 0, now, why, stop=True)


def _surplus(residents: Residents) -> int:
    """Return by how many models the limit is exceeded if one more starts."""
    most = residents.settings.max_residents
    return 0 if most is None else residents.count() + 1 - most
