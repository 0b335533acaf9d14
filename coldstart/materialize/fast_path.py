"""Check of the report of the verification run: it used each section of the new bundle, and its token is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coldstart.contract import fallback
from coldstart.errors import CommandFailedError


class ProofFailedError(CommandFailedError):
    """The verification run failed; `unused` are the sections for which it used a fallback."""

    def __init__(self, message: str | Sequence[str], unused: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unused = unused


def require_fast_path(report: Any, sections: Sequence[str], *, canary: bool) -> None:
    """Raise ProofFailedError if the start used a fallback instead of a section, or if its token differs from the reference."""
    if unused := [name for name in sections if not report["fast_path"].get(name)]:
        reasons = "; ".join(str(one) for one in fallback.decode(report["fallbacks"]))
        raise ProofFailedError(
            f"the start that checks the new bundle used fallbacks: {reasons or 'no reason'}; nothing was published",
            unused,
        )
    if canary and not report.get("canary"):
        raise ProofFailedError(
            "the start that checks the new bundle returned another token than the reference; nothing was published"
        )
