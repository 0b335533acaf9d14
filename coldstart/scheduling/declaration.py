"""Declare settings in the metadata of dataclass fields.

The command line generates an option from each declaration, and values are checked against the declared range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """Help text, command-line option and valid range of a dataclass field.

    `flag` is the option and `unit` the placeholder of its value. Valid values are at least `least`, at most `most`, and greater
    than `above`. Policies in `unused_by` ignore the setting. Simulated servers ignore it if it is `live`.
    """

    about: str
    flag: str = ""
    unit: str | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    unused_by: tuple[str, ...] = ()
    live: bool = False

    @property
    def option(self) -> str:
        """Return the option as a Python identifier: `--kv-strategy` gives `kv_strategy`."""
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """Return the help text of the option, including the valid range."""
        bounds = self._describe_range()
        return f"{self.about} Range: {bounds}." if bounds else self.about

    def require(self, name: str, value: Any) -> None:
        """Raise ValueError if `value` is neither None nor in range."""
        if value is None or self._is_allowed(value):
            return
        expected = f"one of {', '.join(self.choices)}" if self.choices else self._describe_range()
        raise ValueError(f"{self.flag or name} must be {expected}, got {value!r}")

    def _is_allowed(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return within and (self.above is None or value > self.above)

    def _describe_range(self) -> str:
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)


def setting(default: object, about: str, flag: str = "", unit: str | None = None, **more: Any) -> Any:
    """Return a dataclass field with a declared setting; `more` are further fields of Setting."""
    return field(default=default, metadata={"setting": Setting(about, flag, unit, **more)})


def list_settings(dataclass_type: Any) -> Iterator[tuple[str, Setting]]:
    """Yield (name, declaration) of each field of a dataclass or instance that declares a setting."""
    declared = ((one.name, one.metadata.get("setting")) for one in fields(dataclass_type))
    return ((name, one) for name, one in declared if one is not None)
