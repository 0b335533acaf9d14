"""--export: one implementation for every command with a result, early errors, and complete files only."""

import json
from pathlib import Path

import pytest
from coldstart.commands._export import Exports
from support import pages

from coldstart.bench.report import FORMATS, Report
from coldstart.errors import UsageError

ROWS = ({"name": "x | y", "size": 3}, {"name": "z", "size": None})
TABLES = [(("name", "size"), (("x | y", "3"), ("z", "-")))]
RESULT = Report("A <title>", {"a": 1}, ROWS, TABLES)


def test_exports_write_every_form(tmp_path: Path) -> None:
    wanted = [f"{form}={tmp_path / form}" for form in FORMATS]
    assert Exports.parse(wanted).write(RESULT) == list(FORMATS)
    assert json.loads((tmp_path / "json").read_text()) == {"a": 1}
    assert (tmp_path / "csv").read_text() == "name,size\nx | y,3\nz,\n"
    assert "| x \\| y | 3 |" in (tmp_path / "markdown").read_text()
    page = (tmp_path / "html").read_text()
    pages.check(page)
    assert "A &lt;title&gt;" in page and "<td>z</td><td>-</td>" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["pdf"], "expected one of json"),
        (["csv", "json"], "only one"),
        (["csv=/no/such/x"], "not a directory"),
        (["csv=/"], "directory"),
    ],
)
def test_parse_refuses_invalid_exports(given: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Exports.parse(given)


class Broken(Report):
    """Report that cannot be rendered."""

    def render(self, form: str) -> str:
        raise RuntimeError("half")


def test_write_leaves_the_old_file_when_rendering_fails(tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("old")
    with pytest.raises(RuntimeError):
        Exports.parse([f"html={tmp_path / 'x.html'}"]).write(Broken("", {}, (), ()))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.html", "old")]
