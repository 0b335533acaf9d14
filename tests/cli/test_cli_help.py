"""The help is printed whole; the texts are compared with the reference pages by test_docs_reference."""

from pathlib import Path

import pytest
from coldstart.commands import cli


def _help(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.app([*words, "--help"], prog_name="coldstart")
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [(), *((name,) for name in ("fleet", "host", "prefetch", "template", "trust"))]
)
def test_summaries_of_commands_are_whole_when_the_terminal_has_60_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    cut = [line for line in _help(capsys, words).splitlines() if line.endswith("...")]
    assert cut == [f"Usage: coldstart {' '.join((*words, ''))}[OPTIONS] COMMAND [ARGS]..."]
