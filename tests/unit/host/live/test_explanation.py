"""Errors that the user can fix, as one line with their hint."""

from __future__ import annotations

import pytest
from coldstart.artifacts.errors import InvalidJsonError

from coldstart.errors import UsageError
from coldstart.host.live.explanation import explain


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (UsageError("no such model"), "no such model"),
        (UsageError("no such model", hint="name another"), "no such model (hint: name another)"),
        (InvalidJsonError("not JSON", hint="pull it again"), "not JSON [CS-JSON] (hint: pull it again)"),
        (
            UsageError(["it differs in", "--seed: 1\n2", "y"], hint="x"),
            "it differs in --seed: 1\n2; y (hint: x)",
        ),
        (KeyError("weights"), None),
    ],
)
def test_explain_returns_message_and_hint_when_the_error_has_them(
    error: Exception, explained: str | None
) -> None:
    assert explain(error) == explained
