"""Read a key from the file that a user names."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

from coldstart.artifacts.files import read_regular
from coldstart.errors import UsageError, describe

_KEY_CAP = 16 << 10


def read_key(file: Path) -> str:
    """Return the key that a file holds, without surrounding white space.

    Raises:
        UsageError: the file cannot be read, or holds anything but one line of printable ASCII.
    """
    try:
        key = read_regular(file, _KEY_CAP).decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    except (OSError, ValueError) as error:
        name, hint = shlex.quote(str(file)), "specify the file of a key"
        if isinstance(error, FileNotFoundError):
            hint = f"make a key: install -m 600 /dev/null {name} && openssl rand -hex 32 > {name}"
        raise UsageError(f"cannot read {file}: {describe(error)}", hint=hint) from error
    if not key or not key.isprintable():
        raise UsageError(
            f"cannot read a key from {file}: expected one line of ASCII", hint="write the key alone"
        )
    return key


def describe_exposure(file: Path) -> str | None:
    """Return a warning if other users can read the file of a secret, else None."""
    try:
        exposed = file.stat().st_mode & stat.S_IROTH
    except OSError:
        return None
    return f"other users can read {file} (hint: chmod 600 {shlex.quote(str(file))})" if exposed else None
