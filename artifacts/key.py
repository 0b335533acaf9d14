"""Bundle key <hardware, model, runtime, engine>: two keys have equal digests if and only if both fit the same artifacts.

The digest is the SHA-256 of the canonical JSON of flat fields. A key contains no path, so bundles can be moved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, cast

from coldstart.artifacts import canonical
from coldstart.artifacts.errors import InvalidKeyError
from coldstart.artifacts.limits import LIMITS

Scalar = str | int | float | bool | None
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_\-]+)+")
_PATH = re.compile(r"(/|~|\.\.?/|[A-Za-z]:[\\/])")


class FieldMismatch(NamedTuple):
    """Field whose value in the wanted key differs from its value in the found key. A missing field has the value None."""

    field: str
    wanted: Scalar
    found: Scalar


@dataclass(frozen=True)
class Key:
    """Flat mapping of dotted names to scalars, such as {"hardware.name": "...", "engine.dtype": "bfloat16"}.

    Raises InvalidKeyError for an invalid name, a container, a non-finite number, or a value that is a path.
    """

    fields: Mapping[str, Scalar]

    def __post_init__(self) -> None:
        if not self.fields or len(self.fields) > LIMITS.key_fields:
            raise InvalidKeyError(
                f"a key must have between 1 and {LIMITS.key_fields} fields, found {len(self.fields)}"
            )
        clean = {name: _check_scalar(name, value) for name, value in self.fields.items()}
        object.__setattr__(self, "fields", MappingProxyType(dict(sorted(clean.items()))))

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 digest of the canonical JSON of the fields, as sha256:<hex>."""
        return canonical.compute_digest(canonical.serialize(dict(self.fields)))

    @property
    def short_digest(self) -> str:
        """Return the first 12 hex digits of the digest."""
        return self.digest.removeprefix("sha256:")[:12]

    def __hash__(self) -> int:
        return hash(self.digest)


def compare_keys(wanted: Key, found: Key) -> list[FieldMismatch]:
    """Return the fields with different values, sorted by name. The list is empty if and only if the keys are equal."""
    names = sorted({*wanted.fields, *found.fields})
    pairs = [FieldMismatch(name, wanted.fields.get(name), found.fields.get(name)) for name in names]
    return [pair for pair in pairs if not _is_equal(wanted, found, pair)]


def _is_equal(wanted: Key, found: Key, pair: FieldMismatch) -> bool:
    both = (pair.field in wanted.fields) == (pair.field in found.fields)
    return both and type(pair.wanted) is type(pair.found) and pair.wanted == pair.found


def _check_scalar(name: str, value: object) -> Scalar:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 128:
        raise InvalidKeyError(f"invalid key field name {name!r}: expected a dotted name such as engine.dtype")
    if isinstance(value, str):
        return _check_text(name, value)
    if value is not None and not isinstance(value, bool | int | float):
        raise InvalidKeyError(
            f"key field {name} has a value of type {type(value).__name__}; expected a scalar"
        )
    if isinstance(value, float):
        return _normalize_number(name, value)
    return cast("Scalar", value)


def _check_text(name: str, value: str) -> str:
    if len(value) > LIMITS.text_characters:
        raise InvalidKeyError(
            f"the value of key field {name} is longer than {LIMITS.text_characters} characters"
        )
    if _PATH.match(value):
        raise InvalidKeyError(
            f"the value of key field {name} is a path: {value!r}",
            hint="use the digest of the file's content instead",
        )
    return value


def _normalize_number(name: str, value: float) -> int | float:
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidKeyError(f"the value of key field {name} is not a finite number")
    # 1.0 and 1 are the same setting, so they must give the same key.
    return int(value) if value.is_integer() else value
