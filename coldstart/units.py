"""Parse and format memory sizes such as 14GiB."""

from __future__ import annotations

import re

from coldstart.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: object) -> int:
    """Return the number of bytes that an integer or a text such as "14GiB" specifies.

    Raises:
        UsageError: `size` is negative, a float, or text that is not a size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise UsageError(f"invalid size {size!r}", hint="use a number of bytes, or a size such as 14GiB")
    return round(float(match[1]) * _UNITS[match[2] or "B"])


def require_unit(size: object, setting: str, *, hint: str) -> None:
    """Raise UsageError if a memory limit without a unit is too small for any model. The error calls the limit `setting`."""
    if str(size).strip().isdigit() and 0 < int(str(size)) < _UNITS["MiB"]:
        raise UsageError(f"{setting}: no model fits in {size} bytes; the unit may be missing", hint=hint)


def format_memory(size: int) -> str:
    """Return a size in bytes as text, such as "540.0 MiB", or "60.00 GiB" from 10 GiB."""
    if size < 10 * _UNITS["GiB"]:
        return f"{size / _UNITS['MiB']:.1f} MiB"
    return f"{size / _UNITS['GiB']:.2f} GiB"
