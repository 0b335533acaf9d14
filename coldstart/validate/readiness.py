"""Read from a server's ready file whether it used every section of its bundle."""

from __future__ import annotations

from collections.abc import Mapping


def explain_slow_path(readiness: Mapping[str, object]) -> list[str]:
    """Return the reasons why a coldstart server did not use its complete bundle; empty if it did."""
    taken, fallbacks = readiness.get("fast_path"), readiness.get("fallbacks")
    if not isinstance(taken, Mapping) or not isinstance(fallbacks, list):
        return ["the ready file does not report the used sections"]
    missing = [f"{section} was not used" for section, used in taken.items() if not used]
    explained = [f"{entry.get('section')}: {entry.get('reason')}" for entry in fallbacks]
    if not taken and not explained and readiness.get("canary") is not True:
        return ["no section of the bundle was used"]
    return explained or missing
