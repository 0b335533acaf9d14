"""Entries of a newer bundle format neither break list and serve nor are they removed by prune."""

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
    """Publish a bundle of format 2.0 with the same key."""
    return plant(store, canonical.dumps(config(format_version="2.0")))


def _strange(store: Store) -> dict[str, object]:
    """Add an index entry and a member of another entry that only a newer release understands."""
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


def test_list_shows_all_bundles_when_one_is_newer(run: Run, store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    newer = _newer(store)
    shown = run("list").stdout
    assert f"{NAME}:v1" in shown and f"{NAME}:v2" in shown and "newer" in shown
    assert run("list", "-q").stdout.split() == [mine.ref, f"{NAME}@{newer.digest}"]
    listed = json.loads(run("list", "--format=json").stdout)["bundles"]
    assert "CS-FORMAT-NEW" in listed[1]["problem"] and listed[0]["digest"] == mine.digest


def test_find_returns_the_readable_bundle_when_another_is_newer(store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    _newer(store)
    assert store.find(key()) == mine and store.get(NAME) == mine


def test_prune_retains_readable_and_newer_bundle(run: Run, store: Store, home: Path) -> None:
    old = publish(store, home / "s")
    mine = publish(store, home / "s", blocks=9)
    newer = _newer(store)
    run("prune")
    assert store.list() == [mine, newer] and old not in store.list()
    assert mine.verify("checksum") == [] and newer.image_bytes()


def test_prune_retains_unreadable_entry(run: Run, store: Store, home: Path) -> None:
    publish(store, home / "s")
    entry = _strange(store)
    assert NAME in run("list").stdout and "newer release" in run("list").stderr
    publish(store, home / "s", blocks=9)
    done = run("prune")
    assert "newer release" in done.stderr
    index = json.loads((store.root / oci.INDEX_FILE).read_text())
    assert entry in index["manifests"] and index["annotations"] == {"new": "yes"}
    assert len(store.list()) == 1


def test_publish_retains_unknown_members_of_entries(store: Store, home: Path) -> None:
    publish(store, home / "s")
    _strange(store)
    publish(store, home / "s", blocks=9)
    index = json.loads((store.root / oci.INDEX_FILE).read_text())
    assert index["manifests"][0]["platform"] == {"os": "linux"} and len(index["manifests"]) == 3
