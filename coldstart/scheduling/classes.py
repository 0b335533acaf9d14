"""Request classes for `--scheduler deadline`, which set the priority of requests by API key or by header.

The file has one table for each class. A request belongs to the first class that matches:

[interactive]
priority = -10                  # smaller is served earlier; requests without a class have 0
header = "X-Class: interactive" # name and value of a request header
[batch]
priority = 10
key_file = "/run/keys/batch"    # file that contains an API key; relative to the directory of the class file

Invariant: error messages contain no key, and the time that a comparison takes does not depend on the key.
"""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Iterable
from pathlib import Path

from coldstart.errors import UsageError, describe_reason
from coldstart.scheduling.deadline import MAX_CLIENT_PRIORITY
from coldstart.system.secrets import normalize_scheme, read_key

Header = tuple[bytes, bytes]
"""Header name in lower case, and value, both as ASGI provides them."""
_EXAMPLE = 'define [NAME] with priority = 10, and with header = "X-Class: batch" or key_file = "FILE"'


class RequestClasses:
    """Request classes defined in one file. Raises UsageError if the file cannot be read or a class is invalid."""

    def __init__(self, file: Path) -> None:
        try:
            tables = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the request classes in {file}: {describe_reason(error)}", hint=_EXAMPLE
            ) from error
        self._priorities = {}
        for name, table in tables.items():
            try:
                self._priorities[name] = _parse(table, file.parent)
            except ValueError as error:
                raise UsageError(f"invalid request class {name} in {file}: {error}", hint=_EXAMPLE) from error
        if not self._priorities:
            raise UsageError(f"the file {file} contains no request class", hint=_EXAMPLE)

    def find_priority(self, headers: Iterable[Header]) -> int:
        """Return the priority of the first class that matches one of the request headers, or 0."""
        given = [(name, normalize_scheme(value)) for name, value in headers]
        fitting = (
            priority
            for wanted, priority in self._priorities.values()
            if any(one[0] == wanted[0] and hmac.compare_digest(one[1], wanted[1]) for one in given)
        )
        return next(fitting, 0)


def _parse(table: object, folder: Path) -> tuple[Header, int]:
    """Return the header and priority of a class. Raises ValueError if the class is invalid."""
    members = dict(table) if isinstance(table, dict) else {}
    priority = members.pop("priority", None)
    if type(priority) is not int or not -MAX_CLIENT_PRIORITY <= priority <= MAX_CLIENT_PRIORITY:
        raise ValueError(
            f"`priority` must be an integer from -{MAX_CLIENT_PRIORITY} to {MAX_CLIENT_PRIORITY}"
        )
    if len(members) != 1 or not isinstance(word := next(iter(members.values())), str):
        raise ValueError("expected `priority` and either `header` or `key_file` as text, and no other key")
    if "key_file" in members:
        return (b"authorization", b"Bearer " + read_key(folder / word).encode()), priority
    name, colon, value = (part.strip() for part in word.partition(":"))
    if "header" not in members or not (name and colon and value and word.isascii()):
        raise ValueError('expected `key_file`, or `header` in the form "NAME: VALUE"')
    return (name.lower().encode(), value.encode()), priority
