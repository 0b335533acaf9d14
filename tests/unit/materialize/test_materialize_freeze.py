"""The directory of a running snapshot is not removed by another materialization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.bundle import anyone
from coldstart.artifacts.store import Store
from tools import bundles

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.materialize import freeze, progress
from coldstart.materialize.workspace import workspace
from coldstart.system.paths import Cache


@contextmanager
def no_phase(*_: object) -> Iterator[progress.Steps]:
    yield progress.silent


def test_snapshot_directory_stays_during_another_materialization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = Store(tmp_path / "store"), Cache.at(tmp_path / "cache")
    bundle = bundles.publish(store, tmp_path / "scratch")

    def frozen(plan: LaunchPlan, images: Path, timeout_s: float) -> None:
        (images / "pages-1.img").write_bytes(b"pages")
        with workspace(cache.work):
            assert (images / "pages-1.img").read_bytes() == b"pages"

    monkeypatch.setattr(freeze.process_snapshot, "freeze", frozen)
    monkeypatch.setattr(freeze.fetch, "choose", lambda _: None)
    monkeypatch.setattr(freeze.prepare, "prepare", lambda *_, **__: LaunchPlan(Arguments()))
    for name in ("estimates", "describe_nearest"):
        monkeypatch.setattr(freeze, name, lambda _: {})
    lookup: Any = SimpleNamespace(store=store, cache=cache)

    made = freeze.add_snapshot(lookup, bundle, no_phase)

    made.extract("snapshot", tmp_path / "taken", trust=anyone)
    assert [file.name for file in (tmp_path / "taken").iterdir()] == ["pages-1.img"]
    assert list(cache.work.iterdir()) == []
