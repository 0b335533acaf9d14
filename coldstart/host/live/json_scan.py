"""Limits of a JSON body, checked while it arrives and before a parser creates objects from it.

This module counts brackets and colons outside of strings. It does not check whether the text is valid JSON.
"""

from __future__ import annotations

import re

# Bytes between two structural characters, with the strings among them that are short and contain no escape.
_BETWEEN = re.compile(rb'[^"\[\]{}:]*+(?:"[^"\\]{0,64}+"[^"\[\]{}:]*+)*+')
# The rest of a string from an escape on.
_ESCAPED = re.compile(rb'(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _BACKSLASH = b'"', b"\\"


class JsonScan:
    """Scan of one body, part by part."""

    def __init__(self, depth: int, members: int) -> None:
        self._most_depth, self._most_members = depth, members
        self._depth = self._members = 0
        self._in_string = self._in_escape = False

    def feed(self, part: bytes) -> None:
        """Scan the next part. Raises ValueError if the body exceeds a limit."""
        at = 0
        if self._in_escape and part:
            self._in_escape, at = False, 1
        while at < len(part):
            at = self._skip_string(part, at) if self._in_string else self._count(part, at)

    def _skip_string(self, part: bytes, at: int) -> int:
        """Return the position after the end of a string, or the length of the part."""
        end = part.find(_QUOTE, at)
        escape = part.find(_BACKSLASH, at, end if end >= 0 else len(part))
        if escape >= 0:
            match = _ESCAPED.match(part, escape)
            assert match is not None
            end = match.end()
            if part[end : end + 1] == _BACKSLASH:
                self._in_escape = True
                return len(part)
        self._in_string = not 0 <= end < len(part)
        return len(part) if self._in_string else end + 1

    def _count(self, part: bytes, at: int) -> int:
        """Count the next structural character and return the position after it."""
        match = _BETWEEN.match(part, at)
        assert match is not None
        end = match.end()
        mark = part[end : end + 1]
        if mark == _QUOTE:
            self._in_string = True
        elif mark in (b"]", b"}"):
            self._depth -= 1
        elif mark:
            self._depth += mark != b":"
            self._members += 1
            self._check()
        return end + 1

    def _check(self) -> None:
        if self._depth > self._most_depth:
            raise ValueError(f"the JSON is nested more than {self._most_depth} levels deep")
        if self._members > self._most_members:
            raise ValueError(f"the JSON has more than {self._most_members} objects, arrays and members")
