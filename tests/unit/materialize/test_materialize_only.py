"""A materialization without an engine: the sections that it takes over, and what it records for the starts that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


class _Draft:
    def __init__(self) -> None:
        self.kept: list[str] = []

    def keep(self, bundle: Any, name: str) -> None:
        self.kept.append(name)


class _Earlier:
    def has(self, name: str) -> bool:
        return name != "iterations"


def test_the_other_sections_are_taken_over_where_the_last_version_has_them() -> None:
    draft = _Draft()
    materialize._take_over(draft, _Earlier(), {"kv", "iterations", "compile"})  # type: ignore[arg-type]
    assert draft.kept == ["compile", "kv"]


def test_the_first_start_does_not_hash_the_weights_that_materialize_has_hashed(
    model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(self: Assembly) -> None:
        (self.out / "modelinfo.json").write_text("{}")

    monkeypatch.setattr(Assembly, "offline", offline)
    monkeypatch.setattr(Assembly, "prove", lambda self: None)
    cache = Cache(home / "cache")
    lookup = Lookup(model, Arguments(), cache, key(seed=1))
    made = materialize.materialize(lookup, Options(), no_progress)
    monkeypatch.setattr(weights, "plan", lambda *_: pytest.fail("hashed again"))
    assert model.path is not None
    assert weights.identity(model.path, cache.weights) == made.json("modelinfo")["weights"]
