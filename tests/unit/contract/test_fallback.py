"""Fallbacks: one JSON form, which older releases read and write too."""

from __future__ import annotations

import json

import pytest

from coldstart.contract.fallback import Fallback, decode, encode

OLD = {"section": "kv", "reason": "4096 bytes are free now"}


def test_fallback_is_unchanged_when_read_back() -> None:
    one = Fallback("snapshot", "CRIU is missing", hint="apt-get install criu")
    assert decode(json.loads(json.dumps(encode([one])))) == [one]


def test_fallback_keeps_the_old_member_names_when_written() -> None:
    assert Fallback("kv", "4096 bytes are free now").encode() == OLD


def test_fallback_of_an_older_release_is_read_when_it_has_no_hint() -> None:
    assert decode([OLD]) == [Fallback("kv", "4096 bytes are free now")]
    assert decode(None) == []


@pytest.mark.parametrize("document", [None, "kv", {}, {"section": "kv"}, {"section": 1, "reason": "x"}])
def test_from_json_raises_when_the_entry_is_not_a_fallback(document: object) -> None:
    with pytest.raises(ValueError, match="not a fallback"):
        Fallback.decode(document)


def test_fallback_shows_its_hint_when_it_has_one() -> None:
    assert str(Fallback("kv", "no room")) == "kv: no room"
    assert str(Fallback("kv", "no room", "coldstart doctor")) == "kv: no room (hint: coldstart doctor)"
