"""The root of all errors, and one class for each rule of the bundle format, each with a stable code and a hint.

Codes are an API: they are printed, filtered on and written into reports, so a code is never reused for
another rule.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

SUCCESS = 0
CHECK_FAILED = 1
ERROR = 2
NO_BUNDLE = 3
AUTH_REQUIRED = 4


class ColdstartError(Exception):
    """Root of all errors that a user can meet.

    `message` states what failed, on which object and why; it is given as one line, or as several of ours. `lines` are these
    lines: a line break within one of them came from outside. `hint` is what the user can do next, or None. `exit_code` is the
    exit code of a command that ends with the error.
    """

    exit_code: int = ERROR

    def __init__(
        self, message: str | Sequence[str], *, hint: str | None = None, exit_code: int | None = None
    ) -> None:
        self.lines = (message,) if isinstance(message, str) else tuple(message)
        self.message = "\n".join(self.lines)
        super().__init__(self.message)
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class BundleError(ColdstartError):
    """Base of the errors of this package. `code` is stable; str() contains code, message and hint."""

    exit_code = CHECK_FAILED
    code: ClassVar[str] = "CS-BUNDLE"
    default_hint: ClassVar[str] = "materialize the bundle again: coldstart materialize MODEL"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or self.default_hint)

    def __str__(self) -> str:
        return f"{self.code}: {self.message} ({self.hint})"


class InvalidJsonError(BundleError):
    """Not the JSON this format allows: syntax, encoding, NaN, or nesting."""

    code = "CS-JSON"


class DuplicateKeyError(InvalidJsonError):
    """A JSON object names one member twice, so two readers may see two values."""

    code = "CS-DUPKEY"


class TooLargeError(BundleError):
    """A document or count passes its cap."""

    code = "CS-SIZE"
    default_hint = "do not use this bundle; materialize it on this machine: coldstart materialize MODEL"


class ArchiveBombError(TooLargeError):
    """A compressed section unpacks to more bytes, members or ratio than allowed or declared."""

    code = "CS-BOMB"


class DigestMismatchError(BundleError):
    """Bytes on disk or on the wire differ from their sha256."""

    code = "CS-DIGEST"
    default_hint = "fetch the bad blob again: coldstart validate REF --level checksum --repair"


class MissingBlobError(BundleError):
    """A blob that a manifest names is not there."""

    code = "CS-BLOB-MISSING"
    default_hint = DigestMismatchError.default_hint


class UnreadableError(BundleError):
    """The operating system refuses to read a blob: permissions, or a failing disk."""

    code = "CS-UNREADABLE"
    default_hint = "check the permissions and the disk, or fetch it again: coldstart validate REF --repair"


class InvalidManifestError(BundleError):
    """The manifest or its config blob breaks the schema."""

    code = "CS-MANIFEST"


class SectionTableError(InvalidManifestError):
    """The section table in the config and the layers of the manifest disagree."""

    code = "CS-SECTION-TABLE"


class IndexMismatchError(InvalidManifestError):
    """The index names another key or model than the config."""

    code = "CS-INDEX"
    default_hint = "prune the entry and take the bundle over again: coldstart import, or coldstart pull"


class InvalidKeyError(BundleError):
    """A key field has a name or value that a key may not carry."""

    code = "CS-KEY"
    exit_code = ERROR
    default_hint = "give flat dotted names and values that are neither paths nor containers"


class FormatTooNewError(BundleError):
    """Written by a newer major version of the format."""

    code = "CS-FORMAT-NEW"
    default_hint = "install a newer release of coldstart, from where this one came"


class FormatTooOldError(BundleError):
    """Written by an older major version for which no migration exists."""

    code = "CS-FORMAT-OLD"


class NotALayoutError(BundleError):
    """The directory or archive is not an OCI image layout."""

    code = "CS-LAYOUT"
    default_hint = "name a directory or archive that coldstart export or an OCI client wrote"


class SectionMissingError(BundleError):
    """The bundle has no section of this type."""

    code = "CS-SECTION-MISSING"


class SectionUnsupportedError(BundleError):
    """The section's type, version or encoding is not one this version reads."""

    code = "CS-SECTION-UNSUPPORTED"
    default_hint = FormatTooNewError.default_hint


class UnsafePathError(BundleError):
    """A member's name is absolute, climbs out of its tree, or is not portable."""

    code = "CS-PATH"
    default_hint = TooLargeError.default_hint


class UnsafeLinkError(BundleError):
    """A member is a symbolic or hard link."""

    code = "CS-LINK"
    default_hint = TooLargeError.default_hint


class UnsafeMemberError(BundleError):
    """A member is a device, a FIFO, a sparse file or another special kind."""

    code = "CS-SPECIAL"
    default_hint = TooLargeError.default_hint


class DuplicateMemberError(BundleError):
    """Two members of one tree have the same name."""

    code = "CS-DUPMEMBER"
    default_hint = TooLargeError.default_hint


class InvalidTreeError(BundleError):
    """A tar or zstd stream is malformed or cut short."""

    code = "CS-TREE"


class PickleFoundError(BundleError):
    """A section that is not executable holds a pickle."""

    code = "CS-PICKLE"
    default_hint = "leave pickles out of this section; only executable, signed sections may carry code"


class CodeFoundError(BundleError):
    """A section that is not executable holds program code."""

    code = "CS-CODE"
    default_hint = "leave code out of this section; only executable, signed sections may carry code"


class UntrustedError(BundleError):
    """An executable section of a bundle that nobody trusted has signed."""

    code = "CS-UNTRUSTED"
    default_hint = "trust the signer's public key, or materialize here: coldstart materialize MODEL"


class ProcessMemoryError(BundleError):
    """A bundle that holds a process's memory was to leave this machine without a word for it."""

    code = "CS-MEMORY"
    exit_code = ERROR
    default_hint = "if its memory may be read by whoever gets it: --include-snapshot; else materialize without --snapshot"


class InvalidSignatureError(BundleError):
    """A signature, or a key file, is malformed or does not verify."""

    code = "CS-SIGNATURE"
    default_hint = "sign the bundle again, or materialize here: coldstart materialize MODEL"


class InvalidNameError(BundleError):
    """The name of a key holds other characters than letters, digits, `.`, `_` and `-`, or more than 64."""

    code = "CS-NAME"
    exit_code = ERROR
    default_hint = "name it with letters, digits, '.', '_' and '-': --name build-host"


class AmbiguousReferenceError(BundleError):
    """A reference names several bundles."""

    code = "CS-AMBIGUOUS"
    exit_code = ERROR
    default_hint = "name one of them: NAME:vN or NAME@sha256:..."


class InvalidReferenceError(BundleError):
    """A reference to a bundle or remote cannot be parsed."""

    code = "CS-REFERENCE"
    exit_code = ERROR
    default_hint = "write NAME, NAME:vN, NAME@sha256:... or a digest prefix of 12 or more hex digits"


class NoSpaceError(BundleError, OSError):
    """The disk or quota is full; the store is as it was before. Who can do without what was to be written catches OSError."""

    code = "CS-NOSPACE"
    exit_code = ERROR
    default_hint = "free space (coldstart prune), or choose another disk: --cache-dir DIR"


class ReadOnlyStoreError(BundleError, OSError):
    """A write was asked of a store that cannot be written. As NoSpaceError, an OSError."""

    code = "CS-READONLY"
    exit_code = ERROR
    default_hint = "choose a writable store: --cache-dir DIR"


class NoLocksError(BundleError, OSError):
    """The file system of the store knows no locks, so that two writers could tear it. As NoSpaceError, an OSError."""

    code = "CS-LOCK"
    exit_code = ERROR
    default_hint = "choose a store on a file system with locks, such as a local disk: --cache-dir DIR"


class DestinationExistsError(BundleError):
    """The place to write to is already taken."""

    code = "CS-EXISTS"
    exit_code = ERROR
    default_hint = "name a path that does not exist yet"


class DraftClosedError(BundleError):
    """A draft was used after it was published or left, or was given one section twice."""

    code = "CS-DRAFT"
    exit_code = ERROR
    default_hint = "begin a new draft: Store.begin(key)"


class RemoteFailedError(BundleError):
    """A registry, hub or directory could not serve the request."""

    code = "CS-REMOTE"
    exit_code = ERROR
    default_hint = "check the address and the network, then run the command again"


class RemoteDeniedError(RemoteFailedError):
    """A registry or hub wants credentials."""

    code = "CS-AUTH"
    exit_code = AUTH_REQUIRED
    default_hint = "log in (docker login REGISTRY, or hf auth login), then run the command again"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def named_os_errors(what: str) -> Iterator[None]:
    """Turn a full disk and a read-only file system into NoSpaceError and ReadOnlyStoreError.

    Pass everything else on.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(f"no space left while {what}") from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStoreError(f"not writable while {what}") from error
        raise
