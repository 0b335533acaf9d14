"""Base class of all errors, and one class with a stable code and a hint for each rule of the bundle format.

The codes are an API: users filter by them, and reports store them. So a code is never reused for another rule.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

CHECK_FAILED = 1
ERROR = 2
NO_BUNDLE = 3
AUTH_REQUIRED = 4


class ColdstartError(Exception):
    """Base class of all errors that are reported to users.

    `message` states what failed, on which object and why, and `lines` contains its lines. A line break within one of the
    lines comes from quoted input, and the output escapes it. `hint` is a command or a value that the user can type, or
    None. A command that fails with this error exits with `exit_code`.
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
    """Base class of the errors of this package. `code` is stable; str() contains code, message and hint."""

    exit_code = CHECK_FAILED
    code: ClassVar[str] = "CS-BUNDLE"
    default_hint: ClassVar[str] = "materialize the bundle again: coldstart materialize MODEL"

    def __init__(self, message: str | Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or self.default_hint)

    def __str__(self) -> str:
        return f"{self.code}: {self.message} ({self.hint})"


_DO_NOT_USE = "do not use this bundle; materialize it on this machine: coldstart materialize MODEL"
_FETCH_AGAIN = (
    "fetch the bundle again: coldstart pull ADDRESS; or build it again: coldstart materialize MODEL"
)
# The project is not published on a package index.
_UPGRADE = (
    "install a newer version: git pull in the checkout, make dist, pip install dist/coldstart_vllm-*.whl"
)


def _define_error(
    name: str,
    code: str,
    hint: str = BundleError.default_hint,
    *bases: type[Exception],
    exit_code: int = CHECK_FAILED,
) -> type[BundleError]:
    """Create an error class with a code and a default hint. FORMAT.md, section 9, lists the rule behind each code."""
    members = {"__module__": __name__, "code": code, "default_hint": hint, "exit_code": exit_code}
    return type(name, bases or (BundleError,), members)


# JSON and sizes: also a ValueError, as other JSON readers raise.
InvalidJsonError = _define_error(
    "InvalidJsonError", "CS-JSON", BundleError.default_hint, BundleError, ValueError
)
TooLargeError = _define_error("TooLargeError", "CS-SIZE", _DO_NOT_USE, BundleError, ValueError)
ArchiveBombError = _define_error("ArchiveBombError", "CS-BOMB", _DO_NOT_USE, TooLargeError)

# Blobs.
DigestMismatchError = _define_error("DigestMismatchError", "CS-DIGEST", _FETCH_AGAIN)
MissingBlobError = _define_error("MissingBlobError", "CS-BLOB-MISSING", _FETCH_AGAIN)
UnreadableError = _define_error(
    "UnreadableError",
    "CS-UNREADABLE",
    "check the permissions and the disk, or fetch the bundle again: coldstart pull ADDRESS",
)

# Documents.
InvalidManifestError = _define_error("InvalidManifestError", "CS-MANIFEST")
SectionTableError = _define_error(
    "SectionTableError", "CS-SECTION-TABLE", BundleError.default_hint, InvalidManifestError
)
IndexMismatchError = _define_error(
    "IndexMismatchError",
    "CS-INDEX",
    "remove the bundle with coldstart prune REF, then import or pull it again",
    InvalidManifestError,
)
InvalidKeyError = _define_error(
    "InvalidKeyError",
    "CS-KEY",
    "use flat dotted names and values that are neither paths nor containers",
    exit_code=ERROR,
)
FormatTooNewError = _define_error("FormatTooNewError", "CS-FORMAT-NEW", _UPGRADE)
NotALayoutError = _define_error(
    "NotALayoutError",
    "CS-LAYOUT",
    "specify a directory or archive that coldstart export or an OCI client wrote",
)
SectionMissingError = _define_error("SectionMissingError", "CS-SECTION-MISSING")
SectionUnsupportedError = _define_error("SectionUnsupportedError", "CS-SECTION-UNSUPPORTED", _UPGRADE)

# Trees.
UnsafePathError = _define_error("UnsafePathError", "CS-PATH", _DO_NOT_USE)
UnsafeLinkError = _define_error("UnsafeLinkError", "CS-LINK", _DO_NOT_USE)
UnsafeMemberError = _define_error("UnsafeMemberError", "CS-SPECIAL", _DO_NOT_USE)
DuplicateMemberError = _define_error("DuplicateMemberError", "CS-DUPMEMBER", _DO_NOT_USE)
InvalidTreeError = _define_error("InvalidTreeError", "CS-TREE")

# Signatures and keys.
UntrustedError = _define_error(
    "UntrustedError",
    "CS-UNTRUSTED",
    "trust the signer's public key, or materialize here: coldstart materialize MODEL",
)
InvalidSignatureError = _define_error(
    "InvalidSignatureError",
    "CS-SIGNATURE",
    "sign the bundle again, or materialize here: coldstart materialize MODEL",
)
ExposedKeyError = _define_error(
    "ExposedKeyError", "CS-EXPOSED", "remove write access for other users: chmod go-w FILE", exit_code=ERROR
)
InvalidNameError = _define_error(
    "InvalidNameError",
    "CS-NAME",
    "use letters, digits, '.', '_' and '-': --name build-host",
    exit_code=ERROR,
)

# References and stores.
AmbiguousReferenceError = _define_error(
    "AmbiguousReferenceError",
    "CS-AMBIGUOUS",
    "specify one of the bundles: NAME:vN or NAME@sha256:...",
    exit_code=ERROR,
)
InvalidReferenceError = _define_error(
    "InvalidReferenceError",
    "CS-REFERENCE",
    "use NAME, NAME:vN, NAME@sha256:... or a digest prefix of at least 12 hex digits",
    exit_code=ERROR,
)
DestinationExistsError = _define_error(
    "DestinationExistsError", "CS-EXISTS", "specify a path that does not exist", exit_code=ERROR
)

# Writes to a store: an OSError, so that callers can continue without the written data.
NoSpaceError = _define_error(
    "NoSpaceError",
    "CS-NOSPACE",
    "free space (coldstart prune), or choose another disk: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)
ReadOnlyStoreError = _define_error(
    "ReadOnlyStoreError",
    "CS-READONLY",
    "choose a writable store: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)
NoLocksError = _define_error(
    "NoLocksError",
    "CS-LOCK",
    "choose a store on a file system with locks, such as a local disk: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)


class NotRegularError(BundleError, OSError):
    """Error for a pipe, device, socket or directory where a regular file is expected.

    It is also an OSError, so that callers can skip the path.
    """

    code = "CS-FILE"
    exit_code = ERROR
    default_hint = "use a path to a regular file"
    strerror = "not a regular file"


class RemoteFailedError(BundleError):
    """Error for a failed request to a registry, the Hugging Face Hub or a remote directory."""

    code = "CS-REMOTE"
    exit_code = ERROR
    default_hint = "check the address and the network, then run the command again"


class RemoteDeniedError(RemoteFailedError):
    """Error for a request that a registry or the hub rejects because of missing or insufficient credentials."""

    code = "CS-AUTH"
    exit_code = AUTH_REQUIRED
    default_hint = "log in with `docker login REGISTRY` or `hf auth login`, then run the command again"


def describe_reason(error: Exception) -> str:
    """Return the message of an error, without its code and hint."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.message if isinstance(error, ColdstartError) else str(error)


_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def translate_os_errors(action: str, unwritable_hint: str | None = None) -> Iterator[None]:
    """Raise NoSpaceError or ReadOnlyStoreError if a full disk or a denied write causes an OSError in the block.

    `action` completes the message "no space left while ...". `unwritable_hint` replaces the default hint of
    ReadOnlyStoreError. Other errors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise NoSpaceError(f"no space left while {action}") from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStoreError(
                f"permission denied or read-only file system while {action}", hint=unwritable_hint
            ) from error
        raise
