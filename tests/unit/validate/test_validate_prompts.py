"""Prompts from a file."""

import pytest

from coldstart.errors import UsageError
from coldstart.validate.validation import parse_replay


def test_alone_is_always_asked_and_crowds_once_each() -> None:
    settings = parse_replay(None, "8,1,4,8", 16)
    assert (list(settings.crowds), settings.max_tokens, len(settings.prompts)) == ([4, 8], 16, 8)


@pytest.mark.parametrize("wrong", ["", "0", "a", "1,-2", "1,1000"])
def test_invalid_concurrency_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        parse_replay(None, wrong, 16)
