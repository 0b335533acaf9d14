"""Units that people write: sizes such as 14GiB."""

from __future__ import annotations

import re

from coldstart.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(given: object) -> int:
    """Return the bytes of an integer or of text such as "14GiB".

    Raises:
        UsageError: `given` is negative, a float, or text that is not a size.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise UsageError(f"invalid size {given!r}", hint="write bytes, or a size such as 14GiB")
    return round(float(found[1]) * _UNITS[found[2] or "B"])


def require_unit(given: object, place: str, *, hint: str) -> None:
    """Raise UsageError if a memory limit has no unit and is too small for any model: its unit is probably missing."""
    if str(given).strip().isdigit() and 0 < int(str(given)) < _UNITS["MiB"]:
        raise UsageError(f"{place}: no model fits in {given} bytes; the unit may be missing", hint=hint)


def format_memory(size: int) -> str:
    """Return a size in bytes as text: in MiB, such as 540.0 MiB, and in GiB from 10 GiB, such as 60.00 GiB."""
    if size < 10 * _UNITS["GiB"]:
        return f"{size / _UNITS['MiB']:.1f} MiB"
    return f"{size / _UNITS['GiB']:.2f} GiB"
