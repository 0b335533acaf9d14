"""Root of all errors, and one class with a stable code and a hint for each rule of the bundle format.

Codes are an API: they are printed, filtered and written into reports. So a code is never reused for another rule.
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
    """Root of all errors that are reported to users.

    `message` states what failed, on which object and why. The caller passes one line or a list of lines; `lines` has them as
    passed. A line break inside a line is quoted input, which the output must escape. `hint` is what the user can do next, or
    None. `exit_code` is the exit code of a command that ends with the error.
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

    def __init__(self, message: str | Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or self.default_hint)

    def __str__(self) -> str:
        return f"{self.code}: {self.message} ({self.hint})"


class InvalidJsonError(BundleError, ValueError):
    """JSON that this format does not allow: syntax, encoding, NaN, or nesting. A ValueError, as those of other readers."""

    code = "CS-JSON"


class DuplicateKeyError(InvalidJsonError):
    """JSON object that contains one member twice, so that two readers may see two values."""

    code = "CS-DUPKEY"


class TooLargeError(BundleError, ValueError):
    """Document or count above its limit. A ValueError, as InvalidJsonError."""

    code = "CS-SIZE"
    default_hint = "do not use this bundle; materialize it on this machine: coldstart materialize MODEL"


class ArchiveBombError(TooLargeError):
    """Compressed section that unpacks to more bytes or members, or with a higher ratio, than allowed or declared."""

    code = "CS-BOMB"


class DigestMismatchError(BundleError):
    """Bytes on disk or from the network that differ from their sha256."""

    code = "CS-DIGEST"
    default_hint = (
        "fetch the bundle again: coldstart pull ADDRESS; or build it again: coldstart materialize MODEL"
    )


class MissingBlobError(BundleError):
    """Missing blob that a manifest lists."""

    code = "CS-BLOB-MISSING"
    default_hint = DigestMismatchError.default_hint


class UnreadableError(BundleError):
    """Blob that the operating system cannot read: permissions, or a failing disk."""

    code = "CS-UNREADABLE"
    default_hint = "check the permissions and the disk, or fetch the bundle again: coldstart pull ADDRESS"


class NotRegularError(BundleError, OSError):
    """A path is a pipe, device, socket or directory where a file is expected. Also an OSError, so that callers can skip it."""

    code = "CS-FILE"
    exit_code = ERROR
    default_hint = "put a regular file in its place"

    def __init__(self, message: str | Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.strerror = "not a regular file"


class InvalidManifestError(BundleError):
    """Manifest or config blob that does not match the schema."""

    code = "CS-MANIFEST"


class SectionTableError(InvalidManifestError):
    """Section table in the config that differs from the layers of the manifest."""

    code = "CS-SECTION-TABLE"


class IndexMismatchError(InvalidManifestError):
    """Index entry with another key or model than the config."""

    code = "CS-INDEX"
    default_hint = "prune the entry, then import or pull the bundle again"


class InvalidKeyError(BundleError):
    """Key field with an invalid name or value."""

    code = "CS-KEY"
    exit_code = ERROR
    default_hint = "use flat dotted names and values that are neither paths nor containers"


class FormatTooNewError(BundleError):
    """Bundle of a newer major version of the format."""

    code = "CS-FORMAT-NEW"
    # No index has the project's releases.
    default_hint = (
        "install a newer release: git pull in the checkout, make dist, pip install dist/coldstart_vllm-*.whl"
    )


class NotALayoutError(BundleError):
    """Directory or archive that is not an OCI image layout."""

    code = "CS-LAYOUT"
    default_hint = "specify a directory or archive that coldstart export or an OCI client wrote"


class SectionMissingError(BundleError):
    """Bundle without a section of this type."""

    code = "CS-SECTION-MISSING"


class SectionUnsupportedError(BundleError):
    """Section with a type, version or encoding that this release cannot read."""

    code = "CS-SECTION-UNSUPPORTED"
    default_hint = FormatTooNewError.default_hint


class UnsafePathError(BundleError):
    """Name of a member that is absolute, outside its tree, or not portable."""

    code = "CS-PATH"
    default_hint = TooLargeError.default_hint


class UnsafeLinkError(BundleError):
    """Member that is a symbolic or hard link."""

    code = "CS-LINK"
    default_hint = TooLargeError.default_hint


class UnsafeMemberError(BundleError):
    """Member that is a device, a FIFO, a sparse file or another special type."""

    code = "CS-SPECIAL"
    default_hint = TooLargeError.default_hint


class DuplicateMemberError(BundleError):
    """Two members of one tree with the same name."""

    code = "CS-DUPMEMBER"
    default_hint = TooLargeError.default_hint


class InvalidTreeError(BundleError):
    """Malformed or truncated tar or zstd stream."""

    code = "CS-TREE"


class UntrustedError(BundleError):
    """Executable section of a bundle without a trusted signature."""

    code = "CS-UNTRUSTED"
    default_hint = "trust the signer's public key, or materialize here: coldstart materialize MODEL"


class InvalidSignatureError(BundleError):
    """Signature or key file that is malformed or does not verify."""

    code = "CS-SIGNATURE"
    default_hint = "sign the bundle again, or materialize here: coldstart materialize MODEL"


class ExposedKeyError(BundleError):
    """Key, or directory of keys, that another user owns, can replace or can read."""

    code = "CS-EXPOSED"
    exit_code = ERROR
    default_hint = "let only its owner write to it: chmod go-w FILE"


class InvalidNameError(BundleError):
    """Name of a key with characters other than letters, digits, `.`, `_` and `-`, or with more than 64."""

    code = "CS-NAME"
    exit_code = ERROR
    default_hint = "name it with letters, digits, '.', '_' and '-': --name build-host"


class AmbiguousReferenceError(BundleError):
    """Reference that matches several bundles."""

    code = "CS-AMBIGUOUS"
    exit_code = ERROR
    default_hint = "use a reference to one of them: NAME:vN or NAME@sha256:..."


class InvalidReferenceError(BundleError):
    """Reference to a bundle or remote that cannot be parsed."""

    code = "CS-REFERENCE"
    exit_code = ERROR
    default_hint = "write NAME, NAME:vN, NAME@sha256:... or a digest prefix of 12 or more hex digits"


class NoSpaceError(BundleError, OSError):
    """Full disk or quota; the store is unchanged. It is an OSError, so callers can continue without the written data."""

    code = "CS-NOSPACE"
    exit_code = ERROR
    default_hint = "free space (coldstart prune), or choose another disk: --cache-dir DIR"


class ReadOnlyStoreError(BundleError, OSError):
    """Write to a store that is not writable. An OSError, as NoSpaceError."""

    code = "CS-READONLY"
    exit_code = ERROR
    default_hint = "choose a writable store: --cache-dir DIR"


class NoLocksError(BundleError, OSError):
    """Store on a file system without locks, where two writers could damage it. An OSError, as NoSpaceError."""

    code = "CS-LOCK"
    exit_code = ERROR
    default_hint = "choose a store on a file system with locks, such as a local disk: --cache-dir DIR"


class DestinationExistsError(BundleError):
    """Destination that already exists."""

    code = "CS-EXISTS"
    exit_code = ERROR
    default_hint = "use a path that does not exist"


class DraftClosedError(BundleError):
    """Draft that was used after its end, or that received one section twice."""

    code = "CS-DRAFT"
    exit_code = ERROR
    default_hint = "open a new draft: Store.begin(key)"


class RemoteFailedError(BundleError):
    """Failed request to a registry, hub or directory."""

    code = "CS-REMOTE"
    exit_code = ERROR
    default_hint = "check the address and the network, then run the command again"


class RemoteDeniedError(RemoteFailedError):
    """Registry or hub that requires credentials."""

    code = "CS-AUTH"
    exit_code = AUTH_REQUIRED
    default_hint = "log in (docker login REGISTRY, or hf auth login), then run the command again"


def describe(error: Exception) -> str:
    """Return the reason of an error, without a code and a hint."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.message if isinstance(error, ColdstartError) else str(error)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def named_os_errors(what: str, unwritable: str | None = None) -> Iterator[None]:
    """Turn errors of a full disk and of refused writes into NoSpaceError and ReadOnlyStoreError, with the hint `unwritable`.

    Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(f"no space left while {what}") from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStoreError(f"not writable while {what}", hint=unwritable) from error
        raise
