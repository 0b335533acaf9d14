"""Differences between two configurations of a host."""

from __future__ import annotations

from coldstart.host import configuration
from coldstart.host.changes import Configuration, describe_changes, has_changes
from coldstart.host.client_keys import ClientKey

A, B = {"memory": 10, "start_s": 1.0}, {"memory": 5, "start_s": 1.0}


def test_changes_name_models_and_settings() -> None:
    before = Configuration(configuration.parse({"memory": 20, "models": {"a": A, "b": B, "c": A}}))
    models = {"a": {**A, "args": ["--seed", "1"]}, "c": A, "d": B}
    after = Configuration(configuration.parse({"memory": 30, "max_held": 3, "models": models}))
    assert describe_changes(before, after) == {
        "models": ["a", "c", "d"],
        "added": ["d"],
        "removed": ["b"],
        "changed": ["a"],
        "settings": ["memory", "max_held"],
        "clients": {"added": [], "removed": [], "changed": []},
    }
    assert has_changes(describe_changes(before, after))
    assert not has_changes(describe_changes(after, after))


def test_changes_name_clients_also_when_only_a_key_differs() -> None:
    file = configuration.parse({"memory": 20, "models": {"a": A}})
    one, rotated = ClientKey("one", "one.key", b"old"), ClientKey("one", "one.key", b"new")
    gone, other = ClientKey("gone", "gone.key", b"gone"), ClientKey("other", "other.key", b"other")
    found = describe_changes(Configuration(file, (one, gone)), Configuration(file, (rotated, other)))
    assert found["clients"] == {"added": ["other"], "removed": ["gone"], "changed": ["one"]}
    assert has_changes(found)
