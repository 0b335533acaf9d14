"""Prompts from a file."""

from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.validate import answers


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
