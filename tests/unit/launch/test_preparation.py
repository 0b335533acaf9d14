"""The fastest mode that the machine allows is prepared; a failure selects the next slower one and is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import preparation, template_pool
from coldstart.launch.preparation import prepare_fastest
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache

FakeEngine = Callable[[str], None]


@pytest.fixture
def plan(lookup: Lookup) -> LaunchPlan:
    return LaunchPlan(["serves"], key=lookup.key.digest)


@pytest.fixture(autouse=True)
def templates(home: Path) -> Iterator[None]:
    yield
    for warm in template_pool.list_templates():
        template_pool.stop(warm, force=True)


@pytest.fixture
def phases() -> tuple[list[str], Callable[[str], AbstractContextManager[None]]]:
    names: list[str] = []

    def phase(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return nullcontext()

    return names, phase


def prepare(lookup: Lookup, plan: LaunchPlan) -> preparation.Preparation:
    return prepare_fastest(lookup, plan, lambda name: nullcontext(), 20)


def test_an_engine_template_is_started_once_and_found_again(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine, phases: tuple[list[str], preparation.Phase]
) -> None:
    fake_engine("serves")
    names, phase = phases
    first = prepare_fastest(lookup, plan, phase, 20)
    assert (first.mode, first.is_new, first.failures) == ("template-engine", True, ())
    second = prepare_fastest(lookup, plan, phase, 20)
    assert (second.mode, second.is_new, second.failures) == ("template-engine", False, ())
    assert names == ["start a template (engine)"]
    (warm,) = preparation.list_prepared(lookup.cache)
    assert warm.owner[1:] == (str(lookup.model.path),) * 2 and warm.level == "engine"


def test_a_template_belongs_to_the_store_that_started_it(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine, tmp_path: Path
) -> None:
    fake_engine("serves")
    assert prepare(lookup, plan).is_new
    other = replace(lookup, cache=Cache.at(tmp_path / "other"))
    assert not prepare(other, plan).is_new
    assert list(preparation.list_prepared(other.cache)) == []
    assert len(list(preparation.list_prepared(lookup.cache))) == 1


def test_a_template_of_the_user_is_used_and_not_owned(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine
) -> None:
    fake_engine("serves")
    template_pool.start("engine", plan, lookup.model.name, 20)
    assert prepare(lookup, plan).mode == "template-engine"
    assert list(preparation.list_prepared(lookup.cache)) == []


def test_an_unusable_template_is_replaced(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine("serves")
    first = template_pool.start("engine", plan, lookup.model.name, 20)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the template was started without it
    assert prepare(lookup, plan).is_new
    (second,) = template_pool.list_templates()
    assert second.pid != first.pid


def test_the_template_of_another_model_with_this_key_is_retained(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine
) -> None:
    fake_engine("serves")
    other = template_pool.start("engine", plan, "other", 20)
    prepared = prepare(lookup, plan)
    assert prepared.mode == "template-runtime"
    assert (
        prepared.failures[0].reason
        == "cannot start a template for tiny: a template of other with the same key is running"
    )
    assert template_pool.find_ready("engine", plan.key) == other


def test_each_level_that_does_not_start_is_reported(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine
) -> None:
    fake_engine("dies")
    prepared = prepare(lookup, plan)
    assert prepared.mode is None
    assert [one.stage for one in prepared.failures] == ["template-engine", "template-runtime"]
    assert all("no memory for the template" in one.reason for one in prepared.failures)


def test_a_full_disk_prevents_no_start(
    lookup: Lookup, plan: LaunchPlan, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine("serves")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(template_pool, "start", full)
    prepared = prepare(lookup, plan)
    assert prepared.mode is None and "No space left on device" in prepared.failures[0].reason
