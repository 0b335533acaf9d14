"""A materialization without an engine: the sections that it takes over, and what it records for the starts that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.materialize import materialize
from coldstart.materialize.assembly import Assembly
from coldstart.materialize.options import Options, no_progress
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights


@pytest.fixture
def lookup(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    """Look up a model whose engine run writes the section `kv` and whose proof does nothing."""

    def offline(self: Assembly) -> None:
        (self.out / "modelinfo.json").write_text("{}")
        (self.out / "kv.json").write_text('{"bytes": 1}')

    monkeypatch.setattr(Assembly, "offline", offline)
    monkeypatch.setattr(Assembly, "prove", lambda self: None)
    return Lookup(model, Arguments(), Cache(home / "cache"), key(seed=1))


def test_the_other_sections_are_taken_over_where_the_last_version_has_them(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = materialize.materialize(lookup, Options(), no_progress)
    # Two bundles of one second with equal times would be the same bundle.
    monkeypatch.setattr(Assembly, "prove", lambda self: self.seconds.update(again=1.0))
    second = materialize.materialize(lookup, Options(only=("weights",), force=True), no_progress)
    assert (first.version, second.version) == (1, 2)
    assert second.json("kv") == {"bytes": 1} and second.entry("kv") == first.entry("kv")
    assert not second.has("iterations")


def test_the_first_start_does_not_hash_the_weights_that_materialize_has_hashed(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = materialize.materialize(lookup, Options(), no_progress)
    monkeypatch.setattr(weights, "plan", lambda *_: pytest.fail("hashed again"))
    assert lookup.model.path is not None
    found = weights.identity(lookup.model.path, lookup.cache.weights)
    assert found == made.json("modelinfo")["weights"]
