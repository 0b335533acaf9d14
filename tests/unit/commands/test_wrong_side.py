"""The hint for a vLLM option before `--` shows the command with the option after `--`."""

from __future__ import annotations

import pytest
from coldstart.commands._misplaced import separate
from tools.command_line import parse

from coldstart.errors import UsageError
from coldstart.models import options

OURS = {"--port": True, "--dry-run": False, "-q": False}


@pytest.mark.parametrize(
    ("typed", "own", "moved"),
    [
        ("m --max-model-len 1024", "m", "--max-model-len 1024"),
        ("--max-model-len 1024 m", "m", "--max-model-len 1024"),
        ("--enforce-eager m", "m", "--enforce-eager"),
        ("m --max-model-len=1024 --port 8001", "m --port 8001", "--max-model-len=1024"),
        ("--port 8001 m --dry-run --dtype float32 -q", "--port 8001 m --dry-run -q", "--dtype float32"),
        ("m -tp 2 --seed -1", "m", "-tp 2 --seed -1"),
        ("m --port --dtype", "m --port --dtype", ""),
    ],
)
def test_separate_moves_vllm_options_after_the_separator(typed: str, own: str, moved: str) -> None:
    assert separate(typed.split(), OURS) == (own.split(), moved.split())


@pytest.mark.parametrize("command", ["serve", "materialize", "host run", "template start", "prefetch start"])
def test_the_hint_shows_the_corrected_command(command: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*command.split(), "m", "--max-model-len", "1024"])
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"coldstart {command} m -- --max-model-len 1024")


def test_an_option_that_resembles_ours_is_not_taken_for_one_of_vllm() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["serve", "m", "--prt", "8001"])


def test_an_option_of_neither_this_command_nor_vllm_has_the_usual_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "list_options", lambda: frozenset({"dtype", "max-model-len"}))
    with pytest.raises(Exception, match="No such option: --ready-file"):
        parse(["up", "m", "--ready-file", "x"])


@pytest.mark.parametrize(
    ("typed", "corrected"),
    [("--max-modellen 5", "--max-model-len 5"), ("--max-modellen=5 --dype x", "--max-model-len=5 --dtype x")],
)
def test_the_hint_corrects_the_spelling_of_vllm_options(
    typed: str, corrected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "list_options", lambda: frozenset({"dtype", "max-model-len"}))
    with pytest.raises(UsageError) as caught:
        parse(["serve", "m", *typed.split()])
    assert (caught.value.hint or "").endswith(f"coldstart serve m -- {corrected}")


def test_a_command_that_passes_nothing_on_has_the_usual_error() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["list", "--max-model-len", "1024"])
