"""A snapshot stays on this machine, private, until its bundle is pruned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.store import Store
from support.engines import home
from tools import bundles

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import pruning
from coldstart.materialize import materialize
from coldstart.materialize.materialize import workspace
from coldstart.materialize.options import no_progress
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image

__all__ = ["home"]


def test_snapshot_directory_stays_during_another_materialization(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.at(tmp_path / "cache")
    store = Store(cache.bundles)
    bundle = bundles.publish(store, tmp_path / "scratch")

    def frozen(plan: LaunchPlan, images: Path, timeout_s: float) -> None:
        (images / "pages-1.img").write_bytes(b"pages")
        with workspace(cache.work):
            assert (images / "pages-1.img").read_bytes() == b"pages"

    monkeypatch.setattr(materialize.process_snapshot, "freeze", frozen)
    monkeypatch.setattr(materialize.fetch, "choose", lambda _: None)
    monkeypatch.setattr(materialize.prepare, "prepare", lambda *_, **__: LaunchPlan(Arguments()))
    lookup: Any = SimpleNamespace(store=store, cache=cache)
    assert not materialize.has_snapshot(lookup, bundle)

    materialize.add_snapshot(lookup, bundle, no_progress)

    assert materialize.has_snapshot(lookup, bundle) and store.list() == [bundle]
    image = runtime_image.engine_place(cache.runtimes, bundle.digest)
    assert runtime_image.obstacle(image) is None and image.stat().st_mode & 0o077 == 0
    assert {file.name: file.stat().st_mode & 0o777 for file in image.iterdir()} == {"pages-1.img": 0o600}
    assert list(cache.work.iterdir()) == []
    assert pruning.prune(cache, [bundle.name]).frozen == (image,)
    assert not materialize.has_snapshot(lookup, bundle)
