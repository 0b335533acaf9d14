"""Canonical JSON writer and JSON readers with a cap: loads(dumps(x)) == x, and dumps(loads(dumps(x))) gives the same bytes.

Canonical: UTF-8, members sorted by code point, no white space, shortest round-trip numbers, no NaN or infinity.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from coldstart.artifacts import files
from coldstart.artifacts.errors import InvalidJsonError, InvalidManifestError, TooLargeError
from coldstart.artifacts.limits import LIMITS

_T = TypeVar("_T")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def dumps(value: object) -> bytes:
    """Return the canonical bytes of `value`.

    Raises InvalidJsonError for values that JSON cannot represent, such as NaN or a lone surrogate.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJsonError(f"cannot be written as JSON: {error}") from error


def decode(data: bytes, kind: type[_T], *, cap: int, what: str) -> _T:
    """Parse `data` as a value of the type `kind`; members that it does not have are ignored. `what` names the document.

    Raises InvalidJsonError, InvalidManifestError with the place in the document, or TooLargeError for a document, size, length
    or count above its limit.
    """
    _check_size(data, cap, what)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raised = TooLargeError if "<=" in str(error) else InvalidManifestError
        raise raised(f"{what}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{what} is not valid JSON: {error}") from error


def loads(data: bytes, *, cap: int, what: str) -> Any:
    """Parse any JSON document. Raises the errors of `decode`."""
    return decode(data, object, cap=cap, what=what)


def parse(data: bytes, *, cap: int = LIMITS.json_section, what: str) -> Any:
    """Parse JSON of another program, in which NaN is a number.

    Raises TooLargeError or InvalidJsonError, which are ValueErrors.
    """
    _check_size(data, cap, what)
    try:
        value = json.loads(data.decode())
        json.dumps(value, ensure_ascii=False).encode()  # Half a character has no encoding.
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{what} is not valid JSON: {error}") from error
    return value


def read(path: str | Path, *, cap: int = LIMITS.json_section) -> Any:
    """Parse a file as `parse` does. Raises NotRegularError and OSError, TooLargeError and InvalidJsonError."""
    return parse(files.read_regular(path, cap), cap=cap, what=str(path))


def _check_size(data: bytes, cap: int, what: str) -> None:
    if len(data) > cap:
        raise TooLargeError(f"{what} is {len(data)} bytes, the cap is {cap}")


def digest(data: bytes) -> str:
    """Return the content address of `data`: sha256:<64 hex digits>."""
    from hashlib import sha256  # The import loads OpenSSL; completion needs no digest.

    return "sha256:" + sha256(data).hexdigest()


def check_digest(text: str) -> str:
    """Return `text` if it is sha256:<64 lower-case hex digits>, which cannot be a path. Raises InvalidManifestError."""
    if not _DIGEST.fullmatch(text):
        raise InvalidManifestError(f"{text[:200]!r} is not a sha256 digest")
    return text
