"""One class per broken rule; each carries a stable code and the mend.

Codes are an API: they are printed, filtered on and written into reports, so a code is never reused for
another rule.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class BundleError(Exception):
    """Base of every error raised by this package: `code` (stable), `message`, `mend` (what to do next)."""

    code: ClassVar[str] = "CS-BUNDLE"
    default_mend: ClassVar[str] = "materialize the bundle again: coldstart materialize MODEL"

    def __init__(self, message: str, *, mend: str | None = None) -> None:
        self.message = message
        self.mend = mend or self.default_mend
        super().__init__(f"{self.code}: {message} ({self.mend})")


class InvalidJson(BundleError):
    """Not the JSON this format allows: syntax, encoding, NaN, or nesting."""

    code = "CS-JSON"


class DuplicateKey(InvalidJson):
    """A JSON object names one member twice, so two readers may see two values."""

    code = "CS-DUPKEY"


class TooLarge(BundleError):
    """A document or count passes its cap."""

    code = "CS-SIZE"
    default_mend = "do not use this bundle; materialize it on this machine: coldstart materialize MODEL"


class Bomb(TooLarge):
    """A compressed section unpacks to more bytes, members or ratio than allowed or declared."""

    code = "CS-BOMB"


class DigestMismatch(BundleError):
    """Bytes on disk or on the wire differ from their sha256."""

    code = "CS-DIGEST"
    default_mend = "fetch the bad blob again: coldstart validate REF --level checksum --repair"


class MissingBlob(BundleError):
    """A blob that a manifest names is not there."""

    code = "CS-BLOB-MISSING"
    default_mend = DigestMismatch.default_mend


class Unreadable(BundleError):
    """The operating system refuses to read a blob: permissions, or a failing disk."""

    code = "CS-UNREADABLE"
    default_mend = "check the permissions and the disk, or fetch it again: coldstart validate REF --repair"


class InvalidManifest(BundleError):
    """The manifest or its config blob breaks the schema."""

    code = "CS-MANIFEST"


class SectionTable(InvalidManifest):
    """The section table in the config and the layers of the manifest disagree."""

    code = "CS-SECTION-TABLE"


class IndexMismatch(InvalidManifest):
    """The index names another key or model than the config."""

    code = "CS-INDEX"
    default_mend = "prune the entry and take the bundle over again: coldstart import, or coldstart pull"


class InvalidKey(BundleError):
    """A key field has a name or value that a key may not carry."""

    code = "CS-KEY"
    default_mend = "give flat dotted names and values that are neither paths nor containers"


class FormatTooNew(BundleError):
    """Written by a newer major version of the format."""

    code = "CS-FORMAT-NEW"
    default_mend = "install a newer release of coldstart, from where this one came"


class FormatTooOld(BundleError):
    """Written by an older major version for which no migration exists."""

    code = "CS-FORMAT-OLD"


class NotALayout(BundleError):
    """The directory or archive is not an OCI image layout."""

    code = "CS-LAYOUT"
    default_mend = "name a directory or archive that coldstart export or an OCI client wrote"


class SectionMissing(BundleError):
    """The bundle has no section of this type."""

    code = "CS-SECTION-MISSING"


class SectionUnsupported(BundleError):
    """The section's type, version or encoding is not one this version reads."""

    code = "CS-SECTION-UNSUPPORTED"
    default_mend = FormatTooNew.default_mend


class UnsafePath(BundleError):
    """A member's name is absolute, climbs out of its tree, or is not portable."""

    code = "CS-PATH"
    default_mend = TooLarge.default_mend


class UnsafeLink(BundleError):
    """A member is a symbolic or hard link."""

    code = "CS-LINK"
    default_mend = TooLarge.default_mend


class UnsafeMember(BundleError):
    """A member is a device, a FIFO, a sparse file or another special kind."""

    code = "CS-SPECIAL"
    default_mend = TooLarge.default_mend


class DuplicateMember(BundleError):
    """Two members of one tree have the same name."""

    code = "CS-DUPMEMBER"
    default_mend = TooLarge.default_mend


class InvalidTree(BundleError):
    """A tar or zstd stream is malformed or cut short."""

    code = "CS-TREE"


class PickleFound(BundleError):
    """A section that is not executable holds a pickle."""

    code = "CS-PICKLE"
    default_mend = "leave pickles out of this section; only executable, signed sections may carry code"


class CodeFound(BundleError):
    """A section that is not executable holds program code."""

    code = "CS-CODE"
    default_mend = "leave code out of this section; only executable, signed sections may carry code"


class Untrusted(BundleError):
    """An executable section of a bundle that nobody trusted has signed."""

    code = "CS-UNTRUSTED"
    default_mend = "trust the signer's public key, or materialize here: coldstart materialize MODEL"


class MemoryInside(BundleError):
    """A bundle that holds a process's memory was to leave this machine without a word for it."""

    code = "CS-MEMORY"
    default_mend = "if its memory may be read by whoever gets it: --include-snapshot; else materialize without --snapshot"


class InvalidSignature(BundleError):
    """A signature, or a key file, is malformed or does not verify."""

    code = "CS-SIGNATURE"
    default_mend = "sign the bundle again, or materialize here: coldstart materialize MODEL"


class InvalidName(BundleError):
    """The name of a key holds other characters than letters, digits, `.`, `_` and `-`, or more than 64."""

    code = "CS-NAME"
    default_mend = "name it with letters, digits, '.', '_' and '-': --name build-host"


class Ambiguous(BundleError):
    """A reference names several bundles."""

    code = "CS-AMBIGUOUS"
    default_mend = "name one by digest: NAME@sha256:..."


class InvalidReference(BundleError):
    """A reference to a bundle or remote cannot be parsed."""

    code = "CS-REFERENCE"
    default_mend = "write NAME, NAME:vN, NAME@sha256:... or a digest prefix of 12 or more hex digits"


class NoSpace(BundleError, OSError):
    """The disk or quota is full; the store is as it was before. Who can do without what was to be written catches OSError."""

    code = "CS-NOSPACE"
    default_mend = "free space (coldstart prune), or choose another disk: --cache-dir DIR"


class ReadOnlyStore(BundleError, OSError):
    """A write was asked of a store that cannot be written. As NoSpace, an OSError."""

    code = "CS-READONLY"
    default_mend = "choose a writable store: --cache-dir DIR"


class NoLocks(BundleError, OSError):
    """The file system of the store knows no locks, so that two writers could tear it. As NoSpace, an OSError."""

    code = "CS-LOCK"
    default_mend = "choose a store on a file system with locks, such as a local disk: --cache-dir DIR"


class DestinationExists(BundleError):
    """The place to write to is already taken."""

    code = "CS-EXISTS"
    default_mend = "name a path that does not exist yet"


class DraftClosed(BundleError):
    """A draft was used after it was published or left, or was given one section twice."""

    code = "CS-DRAFT"
    default_mend = "begin a new draft: Store.begin(key)"


class RemoteFailed(BundleError):
    """A registry, hub or directory could not serve the request."""

    code = "CS-REMOTE"
    default_mend = "check the address and the network, then run the command again"


class RemoteDenied(RemoteFailed):
    """A registry or hub wants credentials."""

    code = "CS-AUTH"
    default_mend = "log in (docker login REGISTRY, or hf auth login), then run the command again"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def named_os_errors(what: str) -> Iterator[None]:
    """Turn a full disk and a read-only file system into NoSpace and ReadOnlyStore.

    Pass everything else on.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"no space left while {what}") from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStore(f"not writable while {what}") from error
        raise
