"""Typed access to parsed JSON.

A wrong type raises InvalidManifestError with the location, never an AttributeError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from coldstart.artifacts.errors import InvalidManifestError, TooLargeError
from coldstart.artifacts.limits import LIMITS

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def mapping(value: object, where: str) -> Mapping[str, object]:
    """Return `value` if it is an object."""
    if not isinstance(value, dict):
        raise InvalidManifestError(f"{where} is not an object")
    return cast("Mapping[str, object]", value)


def items(value: object, where: str, *, cap: int) -> list[object]:
    """Return `value` if it is an array of at most `cap` items."""
    if not isinstance(value, list):
        raise InvalidManifestError(f"{where} is not an array")
    if len(value) > cap:
        raise TooLargeError(f"{where} has {len(value)} items, the cap is {cap}")
    return cast("list[object]", value)


def text(value: object, where: str, *, cap: int = LIMITS.text) -> str:
    """Return `value` if it is a string of at most `cap` characters."""
    if not isinstance(value, str):
        raise InvalidManifestError(f"{where} is not a string")
    if len(value) > cap:
        raise TooLargeError(f"{where} is longer than {cap} characters")
    return value


def count(value: object, where: str, *, cap: int) -> int:
    """Return `value` if it is an integer in [0, cap]."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidManifestError(f"{where} is not a non-negative integer")
    if value > cap:
        raise TooLargeError(f"{where} is {value}, the cap is {cap}")
    return value


def number(value: object, where: str) -> float:
    """Return `value` if it is a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidManifestError(f"{where} is not a number")
    return float(value)


def digest(value: object, where: str) -> str:
    """Return `value` if it is sha256:<64 lower-case hex digits>.

    This check also prevents a digest from being a path.
    """
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise InvalidManifestError(f"{where} is not a sha256 digest")
    return value


def texts(value: object, where: str, *, cap: int = 256) -> dict[str, str]:
    """Return `value` if it is an object of strings; {} for None."""
    members = mapping({} if value is None else value, where)
    if len(members) > cap:
        raise TooLargeError(f"{where} has {len(members)} members, the cap is {cap}")
    return {text(name, where): text(item, f"{where}.{name}") for name, item in members.items()}
