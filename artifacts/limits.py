"""Size and count limits that every reader of a bundle enforces.

They bound the memory, disk space and time that a hostile bundle can consume. The values are part of the format
(FORMAT.md).
"""

from __future__ import annotations

from dataclasses import dataclass

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Limits:
    """Maximum sizes in bytes (`*_bytes`), lengths in characters (`*_characters`) and counts (all others).

    `tree_ratio` is the maximum number of unpacked bytes per compressed byte. A tree of up to `ratio_floor_bytes` is
    exempt.
    """

    index_bytes: int = 16 * MiB
    manifest_bytes: int = 1 * MiB
    config_bytes: int = 4 * MiB
    json_section_bytes: int = 64 * MiB
    signature_bytes: int = 16 * KiB
    sections: int = 64
    blob_bytes: int = 512 * GiB
    bundle_bytes: int = 1024 * GiB
    tree_bytes: int = 512 * GiB
    tree_members: int = 200_000
    tree_ratio: int = 1000
    ratio_floor_bytes: int = 16 * MiB
    tree_names_bytes: int = 8 * MiB
    path_characters: int = 4096
    path_depth: int = 64
    pax_header_bytes: int = 16 * KiB
    key_fields: int = 512
    text_characters: int = 4096


LIMITS = Limits()
