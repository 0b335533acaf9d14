"""Making room for a model: a set of others leaves, busy ones only once patience has run out.

Invariant: what is already on its way out is counted before anybody else is asked to leave.
"""

from __future__ import annotations

from coldstart.host.model_state import Model
from coldstart.host.residents import Residents


def make_room(residents: Residents, model: Model, now: float, impatient: bool) -> bool:
    """Whether the model may start now. Where not, victims drain if that will do; `impatient` takes busy ones too."""
    need = residents.wanted(model) - residents.device.room()
    surplus = _surplus(residents)
    if need <= 0 and surplus <= 0:
        return True
    need, surplus = need - residents.leaving(), surplus - residents.draining()
    if need <= 0 and surplus <= 0:
        return False
    for busy in (False, True)[: 1 + impatient]:
        free = [name for name in residents.may_leave(busy) if name != model.spec.name]
        if surplus > 0:
            free = [name for name in free if residents.models[name].resident]
        order = list(residents.policy.victims(free, max(need, 1), now))
        if any(_leave(residents, order, need, surplus, now, stop) for stop in (False, True)):
            break
    return False


def _leave(residents: Residents, order: list[str], need: int, surplus: int, now: float, stop: bool) -> bool:
    """Let them drain, one step down or (`stop`) all the way, if that frees `need` bytes and `surplus` models."""
    freed = {name: residents.freed(name, stop) for name in order}
    out = sum(residents.models[name].resident for name in order)
    if sum(freed.values()) < need or out < surplus:
        return False
    for name in order:
        residents.drain(residents.models[name], residents.down(name, stop), now)
    return True


def shrink(residents: Residents, now: float) -> None:
    """Measurements went past the capacity: let go what may go, even if that is not enough."""
    over = -residents.device.room() - residents.leaving()
    if over > 0:
        order = list(residents.policy.victims(residents.may_leave(), over, now))
        _leave(residents, order, 0, 0, now, stop=True)


def _surplus(residents: Residents) -> int:
    """Models too many if one more came."""
    most = residents.settings.max_residents
    return 0 if most is None else residents.count() + 1 - most
