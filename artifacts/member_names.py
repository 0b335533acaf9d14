"""Names of tree members: valid names, and conflicts between them.

Depth, number and total length are limited, so a tree costs time and memory in proportion to its names.
"""

from __future__ import annotations

from enum import Enum

from coldstart.artifacts.errors import ArchiveBombError, DuplicateMemberError, UnsafePathError
from coldstart.artifacts.limits import LIMITS


class _Kind(Enum):
    FILE = "file"
    DIRECTORY = "directory"
    IMPLIED = "implied"


def check_name(name: str) -> None:
    """Raise UnsafePathError unless `name` is relative, plain and portable."""
    if not name or len(name) > LIMITS.path or name.startswith("/"):
        raise UnsafePathError(f"{name[:200]!r} is not a plain relative path")
    if name.count("/") >= LIMITS.path_depth:
        raise UnsafePathError(f"{name[:200]!r} has more than {LIMITS.path_depth} components")
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafePathError(f"{name[:200]!r} is not a plain relative path")
    if not name.isprintable() or "\\" in name or ":" in parts[0][1:2]:
        raise UnsafePathError(f"{name[:200]!r} has characters that no portable path has")
    # A shorter name cannot have a component that is too long: a character has at most four bytes.
    if len(name) > 63 and max(len(part.encode("utf-8", "surrogatepass")) for part in parts) > 255:
        raise UnsafePathError(f"{name[:200]!r} has a component of more than 255 bytes")


class MemberNames:
    """Files and directories of one tree, with the directories that their names imply.

    Implied directories count as entries: an extracted tree has at most `cap` files and directories.
    """

    def __init__(self, cap: int = LIMITS.tree_members) -> None:
        self._cap, self._length = cap, 0
        self._kinds: dict[str, _Kind] = {}

    def add(self, name: str, *, is_directory: bool, header_bytes: int = 0) -> None:
        """Add a checked name, whose pax header has `header_bytes` bytes.

        Raises DuplicateMemberError, UnsafePathError (a file and a directory of one name), or ArchiveBombError above a limit.
        """
        known = self._kinds.get(name)
        if known not in (None, _Kind.IMPLIED):
            raise DuplicateMemberError(f"{name!r} appears twice")
        if known is _Kind.IMPLIED and not is_directory:
            raise UnsafePathError(f"{name!r} is a file, and other members are below it")
        if known is None:
            self._add_parents(name)
        self._enter(name, _Kind.DIRECTORY if is_directory else _Kind.FILE, max(len(name), header_bytes))

    def _add_parents(self, name: str) -> None:
        parent = name.rpartition("/")[0]
        while parent and (known := self._kinds.get(parent)) is not _Kind.DIRECTORY:
            if known is _Kind.IMPLIED:
                return  # Its parents were checked with it.
            if known is _Kind.FILE:
                raise UnsafePathError(f"{name!r} is below a file")
            self._enter(parent, _Kind.IMPLIED, len(parent))
            parent = parent.rpartition("/")[0]

    def _enter(self, name: str, kind: _Kind, length: int) -> None:
        self._kinds[name] = kind
        self._length += length
        if len(self._kinds) > self._cap:
            raise ArchiveBombError(f"more than {self._cap} members and directories above them")
        if self._length > LIMITS.tree_names:
            raise ArchiveBombError(f"the names of the members have more than {LIMITS.tree_names} bytes")
