"""Evict models to free device memory for a start, or because measured memory exceeds the capacity.

Invariant: no model is evicted if draining models will free enough memory.
"""

from __future__ import annotations

from coldstart.host.model_state import Model
from coldstart.host.residents import Place, Residents
from coldstart.units import format_memory


def has_room(residents: Residents, model: Model) -> bool:
    """Return whether `model` can start now without evicting another model."""
    return max(residents.find_shortages(model).values()) <= 0 and _count_surplus_models(residents) <= 0


def free_memory_for(residents: Residents, model: Model, now: float, evict_busy: bool) -> bool:
    """Return whether `model` can start now. If not, drain other models to free the memory that it needs.

    If `evict_busy` is set and evicting idle models does not free enough, models with requests in flight are drained too.
    """
    if has_room(residents, model):
        return True
    shortages = residents.find_shortages(model)
    needs = {place: need - residents.find_draining_bytes(place) for place, need in shortages.items()}
    surplus = _count_surplus_models(residents) - len(residents.list_draining())
    if max(needs.values()) <= 0 and surplus <= 0:
        return False
    for busy in (False, True)[: 1 + evict_busy]:
        candidates = [name for name in residents.list_evictable(busy) if name != model.spec.name]
        if surplus > 0:
            candidates = [name for name in candidates if residents.models[name].is_resident]
        victims = _choose_victims(residents, candidates, needs, surplus, now)
        why, name = _describe_reason(residents, model, shortages), model.spec.name
        if any(_evict(residents, victims, needs, surplus, now, why, stop, name) for stop in (False, True)):
            break
    return False


def _describe_reason(residents: Residents, model: Model, shortages: dict[Place, int]) -> str:
    """Return why models are evicted for `model`: the largest memory shortage, or the maximum number of models."""
    place = max(shortages, key=lambda place: shortages[place])
    evicted = f"evicted for {model.spec.name}"
    if shortages[place] <= 0:
        return f"{evicted}: max_residents is {residents.settings.max_residents}"
    where = "" if place is None else f" of device {place}"
    free = residents.device.free(place)
    needed, limit = shortages[place] + free, residents.device.limit(place)
    available = f"{format_memory(free)} of {format_memory(limit)} are free"
    why = f"{evicted}, which needs {format_memory(needed)}{where}: {available}"
    template = residents.template_memory() if place is None else 0
    return f"{why}, and the runtime template uses {format_memory(template)}" if template else why


def _choose_victims(
    residents: Residents, candidates: list[str], needs: dict[Place, int], surplus: int, now: float
) -> list[str]:
    victims: list[str] = []
    for place, missing in needs.items():
        need = missing - sum(residents.find_freed_bytes(name, place=place) for name in victims)
        if need > 0 or (place is None and not victims and surplus > 0):
            rest = [name for name in candidates if name not in victims]
            victims += _ask_policy(residents, rest, place, need, now)
    return victims


def _ask_policy(
    residents: Residents, candidates: list[str], place: Place, need: int, now: float
) -> list[str]:
    """Return those of `candidates` that the policy chooses to free `need` bytes on the device `place`.

    The policy knows only the total memory of each model, so `need` is converted to a total.
    """
    if place is not None:
        candidates = [name for name in candidates if residents.device.reserved_bytes(name, place)]
        spread = max((len(residents.device.devices(name)) for name in candidates), default=1)
        # Each device's share of a model is rounded up to a byte.
        need = (need + len(candidates)) * spread
    return list(residents.policy.choose_victims(candidates, max(need, 1), now)) if candidates else []


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
    """Drain the victims if they free the bytes in `needs` on each device and at least `surplus` of them are resident.

    Return whether they are drained. Each moves to its next lower tier, or to `stopped` if `stop` is set.
    """
    out = sum(residents.models[name].is_resident for name in victims)
    if out < surplus:
        return False
    for place, need in needs.items():
        if sum(residents.find_freed_bytes(name, stop, place) for name in victims) < need:
            return False
    for name in victims:
        residents.drain(
            residents.models[name], residents.find_eviction_tier(name, stop), now, why, evicted_for
        )
    return True


def evict_excess(residents: Residents, now: float) -> None:
    """Evict models if the measured memory exceeds the capacity, even if the evictions do not free enough."""
    for place in residents.device.list_places():
        excess = -residents.device.free(place) - residents.find_draining_bytes(place)
        if excess > 0:
            victims = _ask_policy(residents, residents.list_evictable(), place, excess, now)
            why = "the models use more memory than the limit"
            _evict(residents, victims, {}, 0, now, why, stop=True)


def _count_surplus_models(residents: Residents) -> int:
    most = residents.settings.max_residents
    return 0 if most is None else sum(one.is_resident for one in residents.models.values()) + 1 - most
