"""Classes of requests: the file, the class of a request, and what an error says."""

from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.scheduling.classes import Classes

KEY = "key-of-the-batch-clients"
FILE = """
[interactive]
priority = -10
header = "X-Class: interactive"
[batch]
priority = 10
key_file = "batch.key"
"""


def test_a_request_has_the_priority_of_the_first_class_that_fits(tmp_path: Path) -> None:
    (tmp_path / "batch.key").write_text(f"{KEY}\n")
    (tmp_path / "classes.toml").write_text(FILE)
    classes = Classes(tmp_path / "classes.toml")
    by_key, by_header = (b"authorization", b"Bearer " + KEY.encode()), (b"x-class", b"interactive")
    assert classes.find([by_key, (b"accept", b"*/*")]) == 10
    assert classes.find([by_key, by_header]) == classes.find([by_header]) == -10
    others = [(b"authorization", b"Bearer other"), (b"x-class", b"batch"), (b"x-other", b"interactive")]
    assert classes.find(others) == classes.find([]) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no class"),
        ("[a", "cannot read the classes"),
        ("a = 1", "the class a needs an integer priority"),
        ('[a]\npriority = 4000\nheader = "a: b"', "between -2047 and 2047"),
        ('[a]\npriority = true\nheader = "a: b"', "needs an integer priority"),
        ("[a]\npriority = 1", "needs either a header or a key_file"),
        ('[a]\npriority = 1\nheader = "a: b"\nkey_file = "k"', "nothing else"),
        ('[a]\npriority = 1\nheader = "no value"', 'form "NAME: VALUE"'),
        ('[a]\npriority = 1\nheaders = "a: b"', "or a key_file"),
        ('[a]\npriority = 1\nkey_file = "missing"', "cannot read"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_the_class(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=reason) as failure:
        Classes(file)
    assert failure.value.hint
