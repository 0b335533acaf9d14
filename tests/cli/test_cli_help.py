"""The help of every command is written down; a change shows up in review.

Refresh with: COLDSTART_REFRESH_GOLDEN=1 pytest tests/cli/test_cli_help.py
"""

import os
from pathlib import Path

import pytest
from coldstart.commands import cli
from coldstart.commands.cli import COMMANDS
from tools.command_line import Run

GOLDEN = Path(__file__).parent.parent / "golden" / "help"
REFRESH = bool(os.environ.get("COLDSTART_REFRESH_GOLDEN"))
PAGES = [
    (),
    *((name,) for name in COMMANDS),
    *(("trust", name) for name in ("list", "add", "remove", "show", "why")),
    *(("fleet", name) for name in ("up", "join", "deploy", "status", "scale", "drain", "remove", "down")),
    *((group, name) for group in ("prefetch", "template") for name in ("start", "status", "stop")),
    *(("template", name) for name in ("freeze", "discard")),
    *(("host", name) for name in ("run", "status", "load", "unload", "logs", "reload", "stop")),
]


def _help(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.app([*words, "--help"], prog_name="coldstart")
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_the_program_prints_its_help(run: Run) -> None:
    assert run("serve", "--help").stdout == (GOLDEN / "serve.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", PAGES, ids=lambda words: "-".join(words) or "coldstart")
def test_help(home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    shown = _help(capsys, words)
    file = GOLDEN / f"{'-'.join(words) or 'coldstart'}.txt"
    if REFRESH:
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words", [(), *((name,) for name in ("fleet", "host", "prefetch", "template", "trust"))]
)
def test_summaries_of_commands_are_whole_when_the_terminal_has_60_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    cut = [line for line in _help(capsys, words).splitlines() if line.endswith("...")]
    assert cut == [f"Usage: coldstart {' '.join((*words, ''))}[OPTIONS] COMMAND [ARGS]..."]


def test_no_page_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {"-".join(words) or "coldstart" for words in PAGES}
