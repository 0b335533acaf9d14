"""A materialization without an engine: the sections that it takes over, and what it records for the starts that follow."""

from __future__ import annotations

from typing import Any

from coldstart.materialize import materialize


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
