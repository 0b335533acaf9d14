"""Errors that the user can fix, as one line with their hint."""

from __future__ import annotations

import pytest
from coldstart.artifacts.errors import InvalidJson

from coldstart.errors import Usage
from coldstart.host.live.explanation import explain


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (Usage("no such model"), "no such model"),
        (Usage("no such model", mend="name another"), "no such model (mend: name another)"),
        (InvalidJson("not JSON", mend="pull it again"), "not JSON [CS-JSON] (mend: pull it again)"),
        (KeyError("weights"), None),
    ],
)
def test_explain_returns_message_and_hint_when_the_error_has_them(
    error: Exception, explained: str | None
) -> None:
    assert explain(error) == explained
