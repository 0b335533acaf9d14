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


@pytest.mark.parametrize("typed", ["serve m --prt 8001", "list --max-model-len 1024"])
def test_an_option_that_is_not_taken_for_one_of_vllm_has_the_usual_error(typed: str) -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(typed.split())
