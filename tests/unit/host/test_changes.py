"""Differences between two configurations of a host."""

from __future__ import annotations

from coldstart.host import configuration
from coldstart.host.changes import describe_changes

A, B = {"memory": 10, "start_s": 1.0}, {"memory": 5, "start_s": 1.0}


def test_changes_name_models_and_settings() -> None:
    before = configuration.parse({"memory": 20, "models": {"a": A, "b": B, "c": A}})
    after = configuration.parse(
        {"memory": 30, "max_held": 3, "models": {"a": {**A, "args": ["--seed", "1"]}, "c": A, "d": B}}
    )
    assert describe_changes(before, after) == {
        "models": ["a", "c", "d"],
        "added": ["d"],
        "removed": ["b"],
        "changed": ["a"],
        "settings": ["memory", "max_held"],
    }
    assert describe_changes(after, after)["settings"] == []
