"""Canonical JSON writer and strict JSON reader: loads(dumps(x)) == x, and dumps(loads(dumps(x))) gives the same bytes.

Canonical: UTF-8, members sorted by code point, no white space, shortest round-trip numbers, no NaN or
infinity. Strict: a cap on bytes and nesting, no duplicate member, no NaN, valid UTF-8. Documents of other programs are read
with the same caps (`parse`, `read`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from coldstart.artifacts import files
from coldstart.artifacts.errors import (
    DuplicateKeyError,
    InvalidJsonError,
    InvalidManifestError,
    TooLargeError,
)
from coldstart.artifacts.limits import LIMITS

_T = TypeVar("_T")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# The escape of half a character, which no encoding can represent.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
    """Parse `data` strictly.

    Raises TooLargeError, DuplicateKeyError or InvalidJsonError; `what` names the document in the message.
    """
    return _parse(data, cap, what, object_pairs_hook=_unique, parse_constant=_no_constant)


def parse(data: bytes, *, cap: int = LIMITS.json_section, what: str) -> Any:
    """Parse JSON of another program with the limits of `loads`. NaN is a number, and the last of equal members counts.

    Raises TooLargeError or InvalidJsonError, which are ValueErrors.
    """
    return _parse(data, cap, what)


def read(path: str | Path, *, cap: int = LIMITS.json_section) -> Any:
    """Parse a file as `parse` does. Raises NotRegularError and OSError, TooLargeError and InvalidJsonError."""
    return parse(files.read_regular(path, cap), cap=cap, what=str(path))


def _parse(data: bytes, cap: int, what: str, **hooks: Any) -> Any:
    if len(data) > cap:
        raise TooLargeError(f"{what} is {len(data)} bytes, the cap is {cap}")
    try:
        value = json.loads(data.decode(), **hooks)
        _check_names(value, 0)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except DuplicateKeyError as error:
        raise DuplicateKeyError(f"{what} is not valid JSON: {error.message}") from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = f"nested deeper than {LIMITS.json_depth}" if deep else str(error)
        raise InvalidJsonError(f"{what} is not valid JSON: {reason}") from error
    return value


def digest(data: bytes) -> str:
    """Return the content address of `data`: sha256:<64 hex digits>."""
    from hashlib import sha256  # The import loads OpenSSL; completion needs no digest.

    return "sha256:" + sha256(data).hexdigest()


def convert(value: object, kind: type[_T], what: str) -> _T:
    """Return parsed JSON as a value of the type `kind`; members that it does not have are ignored.

    Raises InvalidManifestError with the place in the document, or TooLargeError for a size, length or count above its limit.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raised = TooLargeError if "<=" in str(error) else InvalidManifestError
        raise raised(f"{what}: {error}") from error


def check_digest(text: str) -> str:
    """Return `text` if it is sha256:<64 lower-case hex digits>, which cannot be a path. Raises InvalidManifestError."""
    if not _DIGEST.fullmatch(text):
        raise InvalidManifestError(f"{text[:200]!r} is not a sha256 digest")
    return text


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
