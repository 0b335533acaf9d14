"""Memory of models beside a runtime template, whose pages a forked server shares and a server of its own does not."""

from __future__ import annotations

import pytest

from coldstart.host import events
from coldstart.host.configuration import Profile, describe_limits, parse
from coldstart.host.core import Core
from coldstart.host.specification import HostSettings, ModelSpec

TEMPLATE = events.TemplateHeld(540)
GONE = events.TemplateHeld(0, forks=False)


def _core(memory: int, template: events.TemplateHeld = TEMPLATE, **more: int) -> Core:
    models = [ModelSpec.simple(name, 208, 8.0, shared=540) for name in ("a", "b")]
    core = Core(models, HostSettings(memory, **more))
    assert core.handle(template, 0.0) == []
    return core


def _ask(core: Core, model: str, now: float = 1.0) -> list[events.Action]:
    return core.handle(events.Arrived(f"{model}{now}", model), now)


def _start(core: Core, model: str, now: float) -> list[events.Action]:
    return [*_ask(core, model, now), *core.handle(events.Started(model, 1.0), now + 1)]


@pytest.mark.parametrize(("template", "held"), [(TEMPLATE, 208), (GONE, 748)])
def test_a_server_takes_the_shared_pages_where_no_template_lends_them(
    template: events.TemplateHeld, held: int
) -> None:
    core = _core(2000, template)
    _start(core, "a", 1.0)
    assert core.residents.device.reserved("a") == held


def test_a_limit_below_a_server_of_its_own_is_refused_and_keeps_the_template() -> None:
    (refused,) = _ask(_core(700), "a")
    assert isinstance(refused, events.Refuse) and refused.status == 507
    assert any(isinstance(action, events.Start) for action in _ask(_core(748), "a"))


def test_the_measured_size_of_a_server_of_its_own_is_not_that_of_a_forked_one() -> None:
    core = _core(1500, GONE)
    _start(core, "a", 1.0)
    core.handle(events.Measured("a", 764, fresh=True), 3.0)
    assert core.residents.device.reserved("a") == 764
    assert core.handle(TEMPLATE, 4.0) == []
    assert core.residents.models["a"].observed.memory == 224
    core.handle(events.Measured("a", 770, fresh=True), 5.0)
    assert core.residents.device.reserved("a") == 770
    assert core.residents.models["a"].observed.memory == 230


def test_a_smaller_server_of_its_own_crowds_the_template_out() -> None:
    core = Core([ModelSpec.simple("a", 208, 8.0, shared=100)], HostSettings(700))
    assert events.GiveUp() in core.handle(TEMPLATE, 0.0)
    assert core.residents.memory_with_template() == 748


def test_a_reload_retains_what_was_measured_and_whether_there_is_a_template() -> None:
    core = _core(1500)
    _start(core, "a", 1.0)
    core.handle(events.Measured("a", 250), 3.0)
    models = [ModelSpec.simple(name, 208, 8.0, shared=540) for name in ("a", "c")]
    core.handle(events.Configured(tuple(models), None, ""), 4.0)
    memory = {name: model.observed.memory for name, model in core.models.items() if name != "b"}
    assert memory == {"a": 250, "c": 208}


def test_a_limit_below_a_server_of_its_own_is_reported() -> None:
    def profile(_: object) -> Profile:
        return Profile(748 << 20, 8.0, "bundle", shared=540 << 20)

    (note,) = describe_limits(parse({"memory": "700MiB", "models": {"a": {}}}, profile), None)
    assert note.startswith("a needs 748.0 MiB (bundle)")
    assert not list(describe_limits(parse({"memory": "748MiB", "models": {"a": {}}}, profile), None))
