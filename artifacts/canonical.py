"""Canonical JSON writer, and JSON readers with a size limit.

Canonical JSON is UTF-8 with fields sorted by code point, no whitespace, shortest round-trip numbers, and no NaN or
infinity.
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


def serialize(value: object) -> bytes:
    """Return the canonical bytes of `value`.

    Raises InvalidJsonError for values that JSON cannot represent, such as NaN or a lone surrogate.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJsonError(f"cannot write the value as JSON: {error}") from error


def decode(data: bytes, target_type: type[_T], *, max_bytes: int, source: str) -> _T:
    """Parse `data` as `target_type`, ignoring fields that the type does not have.

    `source` names the document in error messages. Raises InvalidJsonError, InvalidManifestError with the position in the
    document, or TooLargeError if the document or a size, length or count in it exceeds a limit.
    """
    _check_size(data, max_bytes, source)
    try:
        return msgspec.json.decode(data, type=target_type)
    except msgspec.ValidationError as error:
        raised = TooLargeError if "<=" in str(error) else InvalidManifestError
        raise raised(f"{source}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{source} is not valid JSON: {error}") from error


def parse_json(data: bytes, *, max_bytes: int = LIMITS.json_section_bytes, source: str) -> Any:
    """Parse JSON that another program wrote, and that may contain NaN. Raises TooLargeError or InvalidJsonError.

    Both errors are ValueErrors.
    """
    _check_size(data, max_bytes, source)
    try:
        value = json.loads(data.decode())
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # Raises an error for lone surrogates, which UTF-8 cannot encode.
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{source} is not valid JSON: {error}") from error
    return value


def read_json(path: str | Path, *, max_bytes: int = LIMITS.json_section_bytes) -> Any:
    """Read and parse a JSON file that another program may have written.

    Raises NotRegularError, OSError, TooLargeError or InvalidJsonError.
    """
    return parse_json(files.read_regular(path, max_bytes), max_bytes=max_bytes, source=str(path))


def _check_size(data: bytes, max_bytes: int, source: str) -> None:
    if len(data) > max_bytes:
        raise TooLargeError(f"{source} has {len(data)} bytes; the limit is {max_bytes} bytes")


def compute_digest(data: bytes) -> str:
    """Return the SHA-256 digest of `data` as sha256:<64 hex digits>."""
    from hashlib import sha256  # The import loads OpenSSL, and shell completion needs no digest.

    return "sha256:" + sha256(data).hexdigest()


def check_digest(text: str) -> str:
    """Return `text` if it is sha256:<64 lower-case hex digits>, which is safe in a path.

    Raises InvalidManifestError otherwise.
    """
    if not _DIGEST.fullmatch(text):
        raise InvalidManifestError(f"invalid digest {text[:200]!r}: expected sha256: and 64 hex digits")
    return text
