"""Limits of the memory, disk and time that a bundle can make a reader use.

A hostile bundle cannot cost a reader more. The numbers are part of the format (FORMAT.md).
"""

from __future__ import annotations

from dataclasses import dataclass

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    `tree_ratio` is unpacked bytes per compressed byte, applied above `ratio_floor` bytes.
    """

    index: int = 16 * MiB
    manifest: int = 1 * MiB
    config: int = 4 * MiB
    json_section: int = 64 * MiB
    signature: int = 16 * KiB
    sections: int = 64
    blob: int = 512 * GiB
    bundle: int = 1024 * GiB
    tree: int = 512 * GiB
    tree_members: int = 200_000
    tree_ratio: int = 1000
    ratio_floor: int = 16 * MiB
    tree_names: int = 8 * MiB
    path: int = 4096
    path_depth: int = 64
    pax_header: int = 16 * KiB
    key_fields: int = 512
    text: int = 4096


LIMITS = Limits()
