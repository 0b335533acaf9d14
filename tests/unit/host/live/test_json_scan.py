"""Scan of JSON bodies: depth and members, whatever the parts in which a body arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.host.live.json_scan import JsonScan

TEXT = st.text(alphabet='ab"\\[]{}:,é\n', max_size=80)
DOCUMENTS = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


def _measure(value: Any) -> tuple[int, int]:
    """Return depth and members of a document."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [_measure(one) for one in inner]
    own = len(value) if isinstance(value, dict) else 0
    return 1 + max((depth for depth, _ in found), default=0), 1 + own + sum(count for _, count in found)


def _passes(body: bytes, cut: int, depth: int, members: int) -> bool:
    scan = JsonScan(depth, members)
    try:
        for at in range(0, len(body), cut):
            scan.feed(body[at : at + cut])
    except ValueError:
        return False
    return True


@given(DOCUMENTS, st.integers(1, 40), st.booleans())
def test_scan_counts_exactly_when_the_body_is_cut_anywhere(value: Any, cut: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    depth, members = _measure(value)
    assert _passes(body, cut, depth, members)
    if members:
        assert not _passes(body, cut, depth - 1, members)
        assert not _passes(body, cut, depth, members - 1)


@pytest.mark.parametrize(
    "body", [b"]" * 100 + b"[" * 103, b'{"a":' * 4, b'"\\"' + b"[" * 9 + b'"' + b"[" * 4]
)
def test_scan_stops_when_text_is_not_json(body: bytes) -> None:
    assert _passes(body, 7, 3, 1000) == (body[0] == 93)
