"""A planned materialization knows the number of its stages and the time of the last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts.key import Mismatch
from support.engines import Publish, home, publish
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.materialize.materialize import estimates
from coldstart.materialize.options import Options
from coldstart.materialize.planned import MaterializationPlan
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.paths import Cache

__all__ = ["home", "publish"]


@pytest.fixture
def lookup(tmp_path: Path) -> Lookup:
    return Lookup(ResolvedModel("m", tmp_path, None, None, {}), Arguments(), Cache(tmp_path), key())


@pytest.mark.parametrize(
    ("has_bundle", "options", "stages"),
    [
        (False, Options(), 5),
        (False, Options(snapshot=True), 6),
        (True, Options(), 0),
        (True, Options(snapshot=True), 1),
        (True, Options(force=True), 5),
        (True, Options(force=True, snapshot=True), 6),
    ],
)
def test_count_stages(
    has_bundle: bool,
    options: Options,
    stages: int,
    lookup: Lookup,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: True)
    known = replace(lookup, bundle=publish()) if has_bundle else lookup
    assert MaterializationPlan(known, options).count_stages() == stages
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    assert MaterializationPlan(known, options).count_stages() is None


def test_earlier_seconds_are_those_of_the_last_materialization(lookup: Lookup, publish: Publish) -> None:
    assert MaterializationPlan(lookup, Options()).earlier_seconds() is None
    earlier = publish()
    known, took = replace(lookup, bundle=earlier), sum(earlier.manifest.provenance.seconds.values())
    assert MaterializationPlan(replace(lookup, nearest=earlier), Options()).earlier_seconds() == took > 0
    assert MaterializationPlan(known, Options()).earlier_seconds() is None
    assert MaterializationPlan(known, Options(force=True)).earlier_seconds() == took


def test_estimates_are_empty_when_the_nearest_bundle_is_of_other_hardware(
    lookup: Lookup, publish: Publish
) -> None:
    differs = (Mismatch("hardware.cpu", "a", "b"),)
    assert estimates(replace(lookup, nearest=publish(), mismatches=differs)) == {}
