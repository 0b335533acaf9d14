"""The record of a part of a start that was done the ordinary way, with the reason.

The JSON form is part of ready files, launch plans and status documents. Its member for the stage is named `section`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    """A `stage` of a start that took its ordinary way, the `reason`, and a `hint` that avoids it next time."""

    stage: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}" + (f" (hint: {self.hint})" if self.hint else "")

    def to_json(self) -> dict[str, str]:
        """Return the JSON object."""
        hint = {"hint": self.hint} if self.hint else {}
        return {"section": self.stage, "reason": self.reason, **hint}

    @classmethod
    def from_json(cls, document: object) -> Fallback:
        """Parse the JSON object. Raises ValueError for anything else."""
        members = document if isinstance(document, Mapping) else {}
        match members.get("section"), members.get("reason"), members.get("hint"):
            case str(stage), str(reason), str(hint) | (None as hint):
                return cls(stage, reason, hint)
        raise ValueError(f"not a fallback: {document!r}")


def to_json(fallbacks: Iterable[Fallback]) -> list[dict[str, str]]:
    """Return the JSON array of a ready file's `fallbacks`."""
    return [fallback.to_json() for fallback in fallbacks]


def from_json(document: object) -> list[Fallback]:
    """Parse a ready file's `fallbacks`, which a server without any may leave out. Raises ValueError as `Fallback.from_json`."""
    entries = document if isinstance(document, list | tuple) else ()
    return [Fallback.from_json(entry) for entry in entries]
