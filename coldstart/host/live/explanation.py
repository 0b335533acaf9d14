"""Errors that the user can fix, as one line with their hint."""

from __future__ import annotations

from coldstart.artifacts.errors import BundleError
from coldstart.errors import ColdstartError


def explain(error: Exception) -> str | None:
    """Return the message and the hint of an error that has them; None for an internal error."""
    if isinstance(error, ColdstartError):
        return error.message + (f" (hint: {error.hint})" if error.hint else "")
    if isinstance(error, BundleError):
        return f"{error.message} [{error.code}] (hint: {error.hint})"
    return None
