"""Format versions MAJOR.MINOR: a reader accepts each minor version of its major version, and migrates older major versions.

A newer minor version may only add members and section types, which older readers retain and ignore. FORMAT.md is normative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from coldstart.artifacts import fields
from coldstart.artifacts.errors import FormatTooNewError, FormatTooOldError, InvalidManifestError

FORMAT_VERSION = "1.0"
_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")

Document = Mapping[str, object]
# Migration from each older major version to the next one; a version without a migration is an error.
STEPS: dict[int, Callable[[Document], Document]] = {}


def major(version: str) -> int:
    """Return the major version. Raises InvalidManifestError unless `version` is MAJOR.MINOR."""
    matched = _VERSION.fullmatch(version)
    if not matched:
        raise InvalidManifestError(f"format_version {version!r} is not MAJOR.MINOR")
    return int(matched[1])


def migrate(document: Document) -> Document:
    """Return `document` in the current major version. Raises FormatTooNewError or FormatTooOldError."""
    version = fields.text(document.get("format_version"), "config.format_version")
    present, wanted = major(version), major(FORMAT_VERSION)
    if present > wanted:
        raise FormatTooNewError(f"format {version} is newer than {FORMAT_VERSION}")
    for step in range(present, wanted):
        if step not in STEPS:
            raise FormatTooOldError(f"format {version} is older than {FORMAT_VERSION} and has no migration")
        document = STEPS[step](document)
    return document
