"""Record of a part of a start that was done the ordinary way, with the reason.

Ready files, launch plans and status documents contain its JSON form, in which the member for the stage is named `section`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Fallback(msgspec.Struct, frozen=True, omit_defaults=True, rename={"stage": "section"}):
    """A stage of a start that was done the ordinary way, the reason, and a hint that avoids this next time."""

    stage: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}" + (f" (hint: {self.hint})" if self.hint else "")

    def encode(self) -> dict[str, str]:
        """Return the JSON object."""
        return dict(msgspec.to_builtins(self))


def encode(fallbacks: Iterable[Fallback]) -> list[dict[str, str]]:
    """Return the JSON array of a ready file's `fallbacks`."""
    return [fallback.encode() for fallback in fallbacks]


def decode(document: object) -> list[Fallback]:
    """Parse a ready file's `fallbacks`, which may be missing. Raises ValueError for any other document."""
    return msgspec.convert(() if document is None else document, list[Fallback])
