"""Fallback: an optimization that a server start did not use, with the reason.

Ready files, launch plans and status documents contain its JSON form, in which `stage` is named `section`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Fallback(msgspec.Struct, frozen=True, omit_defaults=True, rename={"stage": "section"}):
    """Start stage that ran without its optimization, with the reason, and a hint for avoiding the fallback next time."""

    stage: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}" + (f" (hint: {self.hint})" if self.hint else "")

    def encode(self) -> dict[str, str]:
        """Return the fallback as a JSON object."""
        return dict(msgspec.to_builtins(self))


def encode(fallbacks: Iterable[Fallback]) -> list[dict[str, str]]:
    """Encode fallbacks as a JSON array, the `fallbacks` field of a ready file."""
    return [fallback.encode() for fallback in fallbacks]


def decode_fallbacks(document: object) -> list[Fallback]:
    """Parse the `fallbacks` field of a ready file. None means no fallbacks. Raises ValueError if it is invalid."""
    return msgspec.convert(() if document is None else document, list[Fallback])
