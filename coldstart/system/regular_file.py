"""Read small files that a user names, without waiting for a pipe and without reading a device to its end."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from coldstart.errors import UsageError

_KEY_CAP = 16 << 10


def read_regular(path: Path, cap: int) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file, or a link to it.
        cap: The largest size in bytes that is read.

    Raises:
        UsageError: the file cannot be read, is not a regular file, or is larger than `cap`.
    """
    try:
        # Opening a pipe without O_NONBLOCK waits for a writer.
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"cannot read {path}: not a regular file.")
            data = file.read(cap + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    if len(data) > cap:
        raise UsageError(f"cannot read {path}: larger than {cap} bytes.")
    return data


def read_key(file: Path) -> str:
    """Return the key that a file holds, without surrounding white space.

    Raises:
        UsageError: the file cannot be read, or holds anything but one line of printable ASCII.
    """
    try:
        key = read_regular(file, _KEY_CAP).decode("ascii").strip()
    except UsageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UsageError(error.message, hint=f"make a key: {_format_making(file)}") from error
        raise
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable():
        raise UsageError(
            f"cannot read a key from {file}: expected one line of ASCII.", hint="write the key alone"
        )
    return key


def describe_exposure(file: Path) -> str | None:
    """Return a warning if other users can read the file of a secret, else None."""
    try:
        exposed = file.stat().st_mode & stat.S_IROTH
    except OSError:
        return None
    return f"other users can read {file} (hint: chmod 600 {shlex.quote(str(file))})" if exposed else None


def _format_making(file: Path) -> str:
    """Return the command that makes a key file which only its owner can read."""
    name = shlex.quote(str(file))
    return f"install -m 600 /dev/null {name} && openssl rand -hex 32 > {name}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
