"""Record of a part of a start that was done the ordinary way, with the reason.

Ready files, launch plans and status documents contain its JSON form, in which the member for the stage is named `section`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    """A stage of a start that was done the ordinary way, the reason, and a hint that avoids this next time."""

    stage: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}" + (f" (hint: {self.hint})" if self.hint else "")

    def encode(self) -> dict[str, str]:
        """Return the JSON object."""
        hint = {"hint": self.hint} if self.hint else {}
        return {"section": self.stage, "reason": self.reason, **hint}

    @classmethod
    def decode(cls, document: object) -> Fallback:
        """Parse the JSON object. Raises ValueError for any other document."""
        members = document if isinstance(document, Mapping) else {}
        match members.get("section"), members.get("reason"), members.get("hint"):
            case str(stage), str(reason), str(hint) | (None as hint):
                return cls(stage, reason, hint)
        raise ValueError(f"not a fallback: {document!r}")


def encode(fallbacks: Iterable[Fallback]) -> list[dict[str, str]]:
    """Return the JSON array of a ready file's `fallbacks`."""
    return [fallback.encode() for fallback in fallbacks]


def decode(document: object) -> list[Fallback]:
    """Parse a ready file's `fallbacks`, which may be missing. Raises ValueError if `Fallback.decode` does."""
    entries = document if isinstance(document, list | tuple) else ()
    return [Fallback.decode(entry) for entry in entries]
