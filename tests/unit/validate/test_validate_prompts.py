"""Prompts from a file."""

from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.validate import answers
from coldstart.validate.validation import parse_replay


def test_a_text_has_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('Once upon\n\n  {"prompt": 1}\nÜber allen Gipfeln\n')
    assert answers.read_prompts(tmp_path / "p.txt") == ("Once upon", '  {"prompt": 1}', "Über allen Gipfeln")


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"\n \n", "holds no prompt"), (b"\xff\xfe", "cannot read prompts"), (None, "cannot read")],
)
def test_file_without_prompts_is_refused(tmp_path: Path, data: bytes | None, said: str) -> None:
    if data is not None:
        (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(UsageError, match=said) as refused:
        answers.read_prompts(tmp_path / "p.txt")
    assert refused.value.hint is not None and "one prompt per line" in refused.value.hint


def test_json_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(UsageError, match="JSON lines") as refused:
        answers.read_prompts(tmp_path / "p.jsonl")
    assert refused.value.hint == "write one prompt per line"


def test_alone_is_always_asked_and_crowds_once_each() -> None:
    settings = parse_replay(None, "8,1,4,8", 16)
    assert (list(settings.crowds), settings.max_tokens, len(settings.prompts)) == ([4, 8], 16, 8)


@pytest.mark.parametrize("wrong", ["", "0", "a", "1,-2", "1,1000"])
def test_invalid_concurrency_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        parse_replay(None, wrong, 16)
