"""The hint for a vLLM option before `--` shows the option after `--`."""

from __future__ import annotations

import pytest
from tools.command_line import parse

from coldstart.errors import UsageError
from coldstart.models import options


@pytest.fixture
def vllm_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "list_options", lambda: frozenset({"dtype", "max-model-len"}))


@pytest.mark.parametrize("typed", ["m --max-model-len 1024", "--max-model-len=1024 m", "m --max-modellen 5"])
@pytest.mark.parametrize("command", ["serve", "host run"])
def test_the_hint_shows_the_option_as_vllm_spells_it(command: str, typed: str, vllm_options: None) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*command.split(), *typed.split()])
    assert (caught.value.hint or "").endswith(f"coldstart {command} ... -- --max-model-len")
