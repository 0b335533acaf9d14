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
    """Base class of all errors that are reported to users.

    `message` states what failed, on which object and why. The caller passes one line or a list of lines; `lines` keeps them
    as they are. A line break inside a line is quoted input, which the output must escape. `hint` is what the user can do
    next, or None. `exit_code` is the exit code of a command that fails with this error.
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


_DO_NOT_USE = "do not use this bundle; materialize it on this machine: coldstart materialize MODEL"
_FETCH_AGAIN = (
    "fetch the bundle again: coldstart pull ADDRESS; or build it again: coldstart materialize MODEL"
)
# No index has the project's releases.
_UPGRADE = (
    "install a newer release: git pull in the checkout, make dist, pip install dist/coldstart_vllm-*.whl"
)


def _rule(
    name: str,
    code: str,
    hint: str = BundleError.default_hint,
    *bases: type[Exception],
    exit_code: int = CHECK_FAILED,
) -> type[BundleError]:
    """Return the class of the errors with a code. FORMAT.md, section 9, has the rule of each code."""
    members = {"__module__": __name__, "code": code, "default_hint": hint, "exit_code": exit_code}
    return type(name, bases or (BundleError,), members)


# JSON and sizes: a ValueError, as the errors of other readers.
InvalidJsonError = _rule("InvalidJsonError", "CS-JSON", BundleError.default_hint, BundleError, ValueError)
TooLargeError = _rule("TooLargeError", "CS-SIZE", _DO_NOT_USE, BundleError, ValueError)
ArchiveBombError = _rule("ArchiveBombError", "CS-BOMB", _DO_NOT_USE, TooLargeError)

# Blobs.
DigestMismatchError = _rule("DigestMismatchError", "CS-DIGEST", _FETCH_AGAIN)
MissingBlobError = _rule("MissingBlobError", "CS-BLOB-MISSING", _FETCH_AGAIN)
UnreadableError = _rule(
    "UnreadableError",
    "CS-UNREADABLE",
    "check the permissions and the disk, or fetch the bundle again: coldstart pull ADDRESS",
)

# Documents.
InvalidManifestError = _rule("InvalidManifestError", "CS-MANIFEST")
SectionTableError = _rule(
    "SectionTableError", "CS-SECTION-TABLE", BundleError.default_hint, InvalidManifestError
)
IndexMismatchError = _rule(
    "IndexMismatchError",
    "CS-INDEX",
    "prune the entry, then import or pull the bundle again",
    InvalidManifestError,
)
InvalidKeyError = _rule(
    "InvalidKeyError",
    "CS-KEY",
    "use flat dotted names and values that are neither paths nor containers",
    exit_code=ERROR,
)
FormatTooNewError = _rule("FormatTooNewError", "CS-FORMAT-NEW", _UPGRADE)
NotALayoutError = _rule(
    "NotALayoutError",
    "CS-LAYOUT",
    "name a directory or archive that coldstart export or an OCI client wrote",
)
SectionMissingError = _rule("SectionMissingError", "CS-SECTION-MISSING")
SectionUnsupportedError = _rule("SectionUnsupportedError", "CS-SECTION-UNSUPPORTED", _UPGRADE)

# Trees.
UnsafePathError = _rule("UnsafePathError", "CS-PATH", _DO_NOT_USE)
UnsafeLinkError = _rule("UnsafeLinkError", "CS-LINK", _DO_NOT_USE)
UnsafeMemberError = _rule("UnsafeMemberError", "CS-SPECIAL", _DO_NOT_USE)
DuplicateMemberError = _rule("DuplicateMemberError", "CS-DUPMEMBER", _DO_NOT_USE)
InvalidTreeError = _rule("InvalidTreeError", "CS-TREE")

# Signatures and keys.
UntrustedError = _rule(
    "UntrustedError",
    "CS-UNTRUSTED",
    "trust the signer's public key, or materialize here: coldstart materialize MODEL",
)
InvalidSignatureError = _rule(
    "InvalidSignatureError",
    "CS-SIGNATURE",
    "sign the bundle again, or materialize here: coldstart materialize MODEL",
)
ExposedKeyError = _rule(
    "ExposedKeyError", "CS-EXPOSED", "let only its owner write to it: chmod go-w FILE", exit_code=ERROR
)
InvalidNameError = _rule(
    "InvalidNameError",
    "CS-NAME",
    "name it with letters, digits, '.', '_' and '-': --name build-host",
    exit_code=ERROR,
)

# References and stores.
AmbiguousReferenceError = _rule(
    "AmbiguousReferenceError",
    "CS-AMBIGUOUS",
    "use a reference to one of them: NAME:vN or NAME@sha256:...",
    exit_code=ERROR,
)
InvalidReferenceError = _rule(
    "InvalidReferenceError",
    "CS-REFERENCE",
    "write NAME, NAME:vN, NAME@sha256:... or a digest prefix of 12 or more hex digits",
    exit_code=ERROR,
)
DestinationExistsError = _rule(
    "DestinationExistsError", "CS-EXISTS", "name a path that does not exist yet", exit_code=ERROR
)

# Writes to a store: an OSError, so that callers can continue without the written data.
NoSpaceError = _rule(
    "NoSpaceError",
    "CS-NOSPACE",
    "free space (coldstart prune), or choose another disk: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)
ReadOnlyStoreError = _rule(
    "ReadOnlyStoreError",
    "CS-READONLY",
    "choose a writable store: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)
NoLocksError = _rule(
    "NoLocksError",
    "CS-LOCK",
    "choose a store on a file system with locks, such as a local disk: --cache-dir DIR",
    BundleError,
    OSError,
    exit_code=ERROR,
)


class NotRegularError(BundleError, OSError):
    """A path is a pipe, device, socket or directory where a file is expected. Also an OSError, so that callers can skip it."""

    code = "CS-FILE"
    exit_code = ERROR
    default_hint = "put a regular file in its place"

    def __init__(self, message: str | Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.strerror = "not a regular file"


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
