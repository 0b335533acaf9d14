"""Errors that the user can fix, as one line with their hint."""

from __future__ import annotations

from coldstart.artifacts.errors import BundleError
from coldstart.errors import ColdstartError


def explain(error: Exception) -> str | None:
    """Return the message and the hint of an error that has them, on one line; None for an internal error."""
    if isinstance(error, BundleError):
        return f"{error.message} [{error.code}] (hint: {error.hint})"
    if isinstance(error, ColdstartError):
        # The text passes through HTTP and the log, which cannot tell a line of ours from a quoted line break.
        summary, *details = error.lines
        message = f"{summary} {'; '.join(details)}".rstrip()
        return message + (f" (hint: {error.hint})" if error.hint else "")
    return None
