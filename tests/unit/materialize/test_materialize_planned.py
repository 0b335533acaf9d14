"""A planned materialization knows the number of its stages and the time of the last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import Publish, home, publish
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.materialize.options import Options
from coldstart.materialize.planned import MaterializationPlan
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

__all__ = ["home", "publish"]


@pytest.fixture
def lookup(tmp_path: Path) -> Lookup:
    return Lookup(ResolvedModel("m", tmp_path, None, None, {}), Arguments(), Cache(tmp_path), key())


def test_earlier_seconds_are_those_of_the_last_materialization(lookup: Lookup, publish: Publish) -> None:
    assert MaterializationPlan(lookup, Options()).earlier_seconds() is None
    earlier = publish()
    known, took = replace(lookup, bundle=earlier), sum(earlier.manifest.provenance.seconds.values())
    assert MaterializationPlan(replace(lookup, nearest=earlier), Options()).earlier_seconds() == took > 0
    assert MaterializationPlan(known, Options()).earlier_seconds() is None
    assert MaterializationPlan(known, Options(force=True)).earlier_seconds() == took
