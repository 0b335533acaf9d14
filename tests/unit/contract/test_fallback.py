"""Fallbacks: one JSON form."""

from __future__ import annotations

import json

import pytest

from coldstart.contract.fallback import Fallback, decode, encode


def test_fallback_is_unchanged_when_read_back() -> None:
    one = Fallback("snapshot", "CRIU is missing", hint="apt-get install criu")
    assert decode(json.loads(json.dumps(encode([one])))) == [one]


def test_fallbacks_may_be_missing() -> None:
    assert decode(None) == []


@pytest.mark.parametrize("document", [None, "kv", {}, {"section": "kv"}, {"section": 1, "reason": "x"}])
def test_from_json_raises_when_the_entry_is_not_a_fallback(document: object) -> None:
    with pytest.raises(ValueError, match="not a fallback"):
        Fallback.decode(document)


def test_fallback_shows_its_hint_when_it_has_one() -> None:
    assert str(Fallback("kv", "no room")) == "kv: no room"
    assert str(Fallback("kv", "no room", "coldstart doctor")) == "kv: no room (hint: coldstart doctor)"
