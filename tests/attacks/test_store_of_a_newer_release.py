"""Bundles of a newer format neither break list and serve nor are they removed by prune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts import canonical
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import NAME, config, key, plant, publish
from tools.shell import Run

from coldstart.system.paths import Cache
from coldstart.validate.checks import check


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _newer(store: Store) -> Bundle:
    """Publish a bundle of format 2.0 with the same key."""
    return plant(store, canonical.dumps(config(format_version="2.0")))


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
    assert store.find_by_key(key()) == mine and store.find_by_reference(NAME) == mine


def test_prune_retains_readable_and_newer_bundle(run: Run, store: Store, home: Path) -> None:
    old = publish(store, home / "s")
    mine = publish(store, home / "s", blocks=9)
    newer = _newer(store)
    run("prune")
    assert store.list_bundles() == [mine, newer] and old not in store.list_bundles()
    assert check(mine) == [] and newer.read_image_manifest()
