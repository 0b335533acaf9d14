"""A snapshot stays on this machine, private, until its bundle is pruned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.store import Store
from support.engines import home
from tools import bundles
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import pruning
from coldstart.materialize import materialize
from coldstart.materialize.assembly import Assembly
from coldstart.materialize.materialize import MaterializationPlan, workspace
from coldstart.materialize.options import Options, no_progress
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.weights import weights_plan as weights

__all__ = ["home"]


def test_snapshot_directory_stays_during_another_materialization(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.at(tmp_path / "cache")
    store = Store(cache.bundles)
    bundle = bundles.publish(store, tmp_path / "scratch")

    def frozen(plan: LaunchPlan, images: Path, timeout_s: float) -> None:
        (images / "pages-1.img").write_bytes(b"pages")
        with workspace(cache.unfinished):
            assert (images / "pages-1.img").read_bytes() == b"pages"

    monkeypatch.setattr(materialize.process_snapshot, "freeze", frozen)
    monkeypatch.setattr(materialize.fetch, "choose_weights_source", lambda _: None)
    monkeypatch.setattr(materialize.prepare, "plan_with_bundle", lambda *_, **__: LaunchPlan(Arguments()))
    lookup: Any = SimpleNamespace(store=store, cache=cache)
    assert not materialize.has_snapshot(lookup, bundle)

    materialize.add_snapshot(lookup, bundle, no_progress)

    assert materialize.has_snapshot(lookup, bundle) and store.list_bundles() == [bundle]
    image = runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest)
    assert runtime_image.explain_unreadable(image) is None and image.stat().st_mode & 0o077 == 0
    assert {file.name: file.stat().st_mode & 0o777 for file in image.iterdir()} == {"pages-1.img": 0o600}
    assert [left for left in cache.unfinished.iterdir() if left.is_dir()] == []
    assert pruning.prune(cache, [bundle.name]).frozen == (image,)
    assert not materialize.has_snapshot(lookup, bundle)


WRITER = """
import sys, time
from pathlib import Path
caches, over = Path(sys.argv[1]) / "caches", time.monotonic() + 1.5
print("up", flush=True)
while time.monotonic() < over:
    try:
        (caches / str(time.monotonic_ns())).touch()
    except FileNotFoundError:
        break
"""


def test_workspace_is_removed_while_a_child_still_writes(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with workspace(root) as own:
        (own / "caches").mkdir()
        for number in range(5000):  # so that something is written while these are removed
            (own / "caches" / str(number)).touch()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(own)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    assert not own.exists()
    writer.communicate()
    with workspace(root):
        pass
    assert [left for left in root.iterdir() if left.is_dir()] == []


@pytest.fixture
def lookup(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    """Look up a model whose engine run writes the section `kv` and whose proof does nothing."""

    def offline(self: Assembly) -> None:
        (self.out / "modelinfo.json").write_text("{}")
        (self.out / "kv.json").write_text('{"bytes": 1}')

    monkeypatch.setattr(Assembly, "offline", offline)
    monkeypatch.setattr(Assembly, "prove", lambda self: None)
    return Lookup(model, Arguments(), Cache(home / "cache"), key(seed=1))


def test_the_first_start_does_not_hash_the_weights_that_materialize_has_hashed(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MaterializationPlan(lookup, Options()).run()
    monkeypatch.setattr(weights, "plan", lambda *_: pytest.fail("hashed again"))
    assert lookup.model.path is not None
    found = weights.identity(lookup.model.path, lookup.cache.weights)
    assert found == made.read_json("modelinfo")["weights"]
