"""M4: one entry of a newer format broke list and serve, and the older release's prune removed just what it could read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import NAME, config, key, plant, publish
from tools.shell import Run

from coldstart.system.paths import Cache


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _newer(store: Store) -> Bundle:
    """A bundle of format 2.0, of the same key, published last."""
    return plant(store, canonical.dumps(config(format_version="2.0")))


def _strange(store: Store) -> dict[str, object]:
    """An index entry that only a newer release understands, and a member of another that only it has."""
    entry: dict[str, object] = {
        "mediaType": "application/vnd.example.v9",
        "digest": "blake3:ab",
        "size": "large",
    }
    path = store.root / oci.INDEX_FILE
    index = json.loads(path.read_text())
    index["manifests"][0]["platform"] = {"os": "linux"}
    index["manifests"].append(entry)
    path.write_text(json.dumps({**index, "annotations": {"new": "yes"}}))
    return entry


def test_m4_the_others_are_listed(run: Run, store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    newer = _newer(store)
    shown = run("list").stdout
    assert f"{NAME}:v1" in shown and f"{NAME}:v2" in shown and "newer" in shown
    assert run("list", "-q").stdout.split() == [mine.ref, f"{NAME}@{newer.digest}"]
    listed = json.loads(run("list", "--format=json").stdout)["bundles"]
    assert "CS-FORMAT-NEW" in listed[1]["problem"] and listed[0]["digest"] == mine.digest


def test_m4_what_can_be_read_is_taken(store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    _newer(store)
    assert store.find(key()) == mine and store.get(NAME) == mine


def test_m4_prune_leaves_both(run: Run, store: Store, home: Path) -> None:
    old = publish(store, home / "s")
    mine = publish(store, home / "s", blocks=9)
    newer = _newer(store)
    run("prune")
    assert store.list() == [mine, newer] and old not in store.list()
    assert mine.verify("checksum") == [] and newer.image_bytes()


def test_m4_an_entry_that_cannot_be_read_at_all(run: Run, store: Store, home: Path) -> None:
    publish(store, home / "s")
    entry = _strange(store)
    assert NAME in run("list").stdout and "newer release" in run("list").stderr
    publish(store, home / "s", blocks=9)
    done = run("prune")
    assert "newer release" in done.stderr
    index = json.loads((store.root / oci.INDEX_FILE).read_text())
    assert entry in index["manifests"] and index["annotations"] == {"new": "yes"}
    assert len(store.list()) == 1


def test_m4_what_a_newer_release_added_to_an_entry_stays(store: Store, home: Path) -> None:
    publish(store, home / "s")
    _strange(store)
    publish(store, home / "s", blocks=9)
    index = json.loads((store.root / oci.INDEX_FILE).read_text())
    assert index["manifests"][0]["platform"] == {"os": "linux"} and len(index["manifests"]) == 3
