"""Prompts from a file."""

import json
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.validate import prompts
from coldstart.validate.validation import parse_replay


def test_a_text_has_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('Once upon\n\n  {"prompt": 1}\nÜber allen Gipfeln\n')
    assert prompts.read(tmp_path / "p.txt") == ("Once upon", '  {"prompt": 1}', "Über allen Gipfeln")


def test_json_lines_are_those_of_vllms_own_benchmark(tmp_path: Path) -> None:
    rows = [{"prompt": "What is\nthat?", "output_tokens": 10}, {"prompt": "A"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert prompts.read(tmp_path / "p.jsonl") == ("What is\nthat?", "A")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"messages": []}\n', "line 2"),
        ("p.jsonl", b"Once\n", "line 1"),
        ("p.jsonl", b'{"prompt": [1, 2]}\n', "non-empty string"),
        ("p.txt", b"\n \n", "holds no prompt"),
        ("p.txt", b"\xff\xfe", "cannot read prompts"),
    ],
)
def test_file_without_prompts_is_refused(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=said) as refused:
        prompts.read(tmp_path / name)
    assert refused.value.hint is not None and "one prompt per line" in refused.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read prompts"):
        prompts.read(tmp_path / "none")


def test_alone_is_always_asked_and_crowds_once_each() -> None:
    settings = parse_replay(None, "8,1,4,8", 16)
    assert (list(settings.crowds), settings.max_tokens, len(settings.prompts)) == ([4, 8], 16, 8)


@pytest.mark.parametrize("wrong", ["", "0", "a", "1,-2", "1,1000"])
def test_invalid_concurrency_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        parse_replay(None, wrong, 16)
