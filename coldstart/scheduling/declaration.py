"""Declared settings: the help text, command-line option and valid range in the metadata of dataclass fields.

The command line generates an option from each declaration, and each value is checked against the declared range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """Declaration of a setting: its help text, command-line option and valid range.

    `flag` is the option, and `metavar` the placeholder for its value in the help text. A valid value is at least `minimum`,
    at most `maximum`, and greater than `exclusive_minimum`. The policies in `unused_by_policies` ignore the setting. If
    `is_live_only` is True, simulated servers ignore it.
    """

    description: str
    flag: str = ""
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    choices: tuple[str, ...] = ()
    unused_by_policies: tuple[str, ...] = ()
    is_live_only: bool = False

    @property
    def option(self) -> str:
        """Return the option as a Python identifier, such as `kv_strategy` for `--kv-strategy`."""
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """Return the help text of the option, including the valid range."""
        bounds = self._describe_range()
        return f"{self.description} Range: {bounds}." if bounds else self.description

    def require_valid(self, name: str, value: Any) -> None:
        """Raise ValueError if `value` is not valid; the message names the option, or else `name`. None is always valid."""
        if value is None or self._is_allowed(value):
            return
        expected = f"one of {', '.join(self.choices)}" if self.choices else self._describe_range()
        raise ValueError(f"{self.flag or name} must be {expected}, found {value!r}")

    def _is_allowed(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        within = (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )
        return within and (self.exclusive_minimum is None or value > self.exclusive_minimum)

    def _describe_range(self) -> str:
        bounds = (("at least", self.minimum), ("above", self.exclusive_minimum), ("at most", self.maximum))
        return ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)


def setting(
    default: object, description: str, flag: str = "", metavar: str | None = None, **more: Any
) -> Any:
    """Return a dataclass field that declares a setting; `more` contains additional fields of Setting."""
    return field(default=default, metadata={"setting": Setting(description, flag, metavar, **more)})


def list_settings(dataclass_type: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the name and declaration of each setting in a dataclass or in an instance of one."""
    declared = ((one.name, one.metadata.get("setting")) for one in fields(dataclass_type))
    return ((name, one) for name, one in declared if one is not None)
