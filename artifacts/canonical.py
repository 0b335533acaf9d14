"""Canonical JSON writer and strict JSON reader: loads(dumps(x)) == x, and dumps(loads(dumps(x))) gives the same bytes.

Canonical: UTF-8, members sorted by code point, no white space, shortest round-trip numbers, no NaN or
infinity. Strict: a cap on bytes and nesting, no duplicate member, no NaN, valid UTF-8.
"""

from __future__ import annotations

import json
from typing import NoReturn

from coldstart.artifacts.errors import DuplicateKeyError, InvalidJsonError, TooLargeError
from coldstart.artifacts.limits import LIMITS


def dumps(value: object) -> bytes:
    """Return the canonical bytes of `value`.

    Raises InvalidJsonError for values that JSON cannot represent, such as NaN or a lone surrogate.
    """
    try:
        _check_names(value, 0)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJsonError(f"cannot be written as JSON: {error}") from error


def loads(data: bytes, *, cap: int, what: str) -> object:
    """Parse `data`.

    Raises TooLargeError, DuplicateKeyError or InvalidJsonError; `what` names the document in the message.
    """
    if len(data) > cap:
        raise TooLargeError(f"{what} is {len(data)} bytes, the cap is {cap}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        _check_names(value, 0)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{what} is not valid JSON: {error}") from error
    return value


def digest(data: bytes) -> str:
    """Return the content address of `data`: sha256:<64 hex digits>."""
    from hashlib import sha256  # The import loads OpenSSL; completion needs no digest.

    return "sha256:" + sha256(data).hexdigest()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKeyError(f"member {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no number {name}")


def _check_names(value: object, depth: int) -> None:
    # json.dumps would convert a number used as a name to text, and sort it with real text.
    if depth > LIMITS.json_depth:
        raise ValueError(f"nested deeper than {LIMITS.json_depth}")
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("member names must be text")
        for item in value.values():
            _check_names(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_names(item, depth + 1)
