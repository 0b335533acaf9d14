"""The hint for a vLLM option before `--` shows the option after `--`."""

from __future__ import annotations

import pytest
from tools.command_line import parse

from coldstart.errors import UsageError


@pytest.mark.parametrize("typed", ["m --max-model-len 1024", "--max-model-len=1024 m"])
@pytest.mark.parametrize("command", ["serve", "host run"])
def test_the_hint_shows_the_option_after_two_dashes(command: str, typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*command.split(), *typed.split()])
    assert (caught.value.hint or "").endswith(f"coldstart {command} ... -- --max-model-len")
