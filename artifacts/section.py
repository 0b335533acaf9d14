"""Types of sections. The type decides the encoding and whether a section is code; a bundle cannot change that.

A type that is not in SECTION_TYPES (from a newer minor version) is retained and reported, never opened or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Encoding = Literal["json", "tar.zst"]
_SUFFIX: Mapping[Encoding, str] = {"json": "+json", "tar.zst": ".tar+zstd"}


@dataclass(frozen=True, slots=True)
class SectionType:
    """Type of a section: `version` is the newest that this release reads, and the one that it writes."""

    name: str
    version: int
    executable: bool
    encoding: Encoding

    @property
    def media_type(self) -> str:
        """Return the OCI media type of the layer, such as application/vnd.coldstart.section.kv.v1+json."""
        return f"application/vnd.coldstart.section.{self.name}.v{self.version}{_SUFFIX[self.encoding]}"


def _declare(names: tuple[str, ...], *, executable: bool, encoding: Encoding) -> dict[str, SectionType]:
    return {name: SectionType(name, 1, executable, encoding) for name in names}


SECTION_TYPES: Mapping[str, SectionType] = MappingProxyType(
    _declare(("kv", "modelinfo", "weights", "iterations", "stages"), executable=False, encoding="json")
    | _declare(("compile", "graphs"), executable=True, encoding="tar.zst")
)
