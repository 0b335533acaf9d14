"""Declaration of a setting, kept in the metadata of its dataclass field.

The command line generates an option from a declaration, and a value is checked against the range that it states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """Help, command-line option and range of one field.

    `flag` is the option, `unit` the placeholder of its value. A value lies between `least` and `most`, both included, and
    above `above`. The policies in `unused_by` ignore the setting, and so do simulated servers if it is `live`.
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
        """Return the option's name as a Python parameter."""
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """Return the help text of the option, with the range of its value."""
        bounds = self._bounds()
        return f"{self.about} Range: {bounds}." if bounds else self.about

    def require(self, name: str, value: Any) -> None:
        """Raise ValueError if `value` is out of range; None, the default of some fields, is allowed."""
        if value is None or self._allows(value):
            return
        wanted = f"one of {', '.join(self.choices)}" if self.choices else self._bounds()
        raise ValueError(f"{self.flag or name} must be {wanted}, got {value!r}")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return within and (self.above is None or value > self.above)

    def _bounds(self) -> str:
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)


def setting(default: object, about: str, flag: str = "", unit: str | None = None, **more: Any) -> Any:
    """Return a dataclass field with a declaration; `more` are further members of Setting."""
    return field(default=default, metadata={"setting": Setting(about, flag, unit, **more)})


def list_settings(kind: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the name and the declaration of each declared field of a dataclass or its object."""
    declared = ((one.name, one.metadata.get("setting")) for one in fields(kind))
    return ((name, one) for name, one in declared if one is not None)
