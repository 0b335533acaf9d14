"""``--export FORM=FILE``: one result as JSON, CSV, Parquet, a page or Markdown, the same for every command that has it.

Invariant: what cannot be written (an unknown form, a directory that is not there, a missing package) is said before the work
begins; a file is whole or absent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from coldstart.artifacts.files import replacing
from coldstart.commands._output import Output

from coldstart.errors import Usage
from coldstart.measure.report import markdown
from coldstart.measure.report.frames import Row, Table, write_csv, write_parquet
from coldstart.measure.report.page import page, table

FORMS = ("json", "csv", "parquet", "html", "markdown")
# What a form needs beside the standard library, and how it is had.
NEEDS = {
    "csv": ("pandas", "coldstart install report"),
    "html": ("bokeh", "coldstart install report"),
    "parquet": ("pyarrow", "coldstart install parquet"),
}


@dataclass(frozen=True)
class Result:
    """What a command found. `document` is its JSON; without a page or Markdown of its own, those are the table's."""

    title: str
    document: Mapping[str, Any]
    table: Table
    page: Callable[[], str] | None = None
    markdown: Callable[[], str] | None = None

    @classmethod
    def of(
        cls, title: str, document: Mapping[str, Any], columns: Mapping[str, str], rows: Sequence[Row]
    ) -> "Result":
        """One whose table is small enough to lie in memory."""
        return cls(title, document, Table.of(columns, rows))

    def text(self, form: str) -> str:
        """In any form but parquet."""
        if form == "json":
            return json.dumps(self.document, indent=2, default=str)
        if form == "csv":
            write_csv(self.table, out := StringIO())
            return out.getvalue()
        if form == "html":
            shown = self.page or (lambda: page(self.title, table(self.table.columns, self.table.texts())))
            return shown()
        return self.markdown() if self.markdown else self._markdown()

    def _markdown(self) -> str:
        lines = markdown.table(list(self.table.columns), self.table.texts())
        return "\n".join([f"# {self.title}", "", *lines, ""])

    def write(self, form: str, out: IO[bytes]) -> None:
        """In any form, as UTF-8 where it is text."""
        if form == "parquet":
            write_parquet(self.table, out)
        elif form == "csv":
            text = TextIOWrapper(out, encoding="utf-8", newline="")
            write_csv(self.table, text)
            text.detach()
        else:
            out.write(self.text(form).encode() + b"\n" * (form == "json"))


@dataclass(frozen=True)
class Exports:
    """What was asked for: at most one form instead of the usual result, and any number of files."""

    form: str | None = None
    files: Mapping[Path, str] | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> "Exports":
        """Raises Usage for what cannot be written."""
        pairs = [item.partition("=")[::2] for item in given]
        for form, file in pairs:
            _check(form, file)
        results = [form for form, file in pairs if not file]
        if len(results) > 1:
            raise Usage("only one --export can be the result.", mend="name files: --export html=FILE")
        return cls(next(iter(results), None), {Path(file): form for form, file in pairs if file})

    @property
    def forms(self) -> set[str]:
        """All that are asked for, as files or as the result."""
        return {*(self.files or {}).values(), *([self.form] if self.form else [])}

    def and_files(self, files: Mapping[Path, str]) -> "Exports":
        """With further files. Raises Usage for what cannot be written."""
        for path, form in files.items():
            _check(form, str(path))
        return replace(self, files={**(self.files or {}), **files})

    def write(self, result: Result) -> list[str]:
        """Every file; their names. Raises Usage for one that cannot be written."""
        for path, form in (self.files or {}).items():
            try:
                if path.exists() and not path.is_file():  # a pipe or a device
                    with path.open("wb") as out:
                        result.write(form, out)
                else:
                    with replacing(path) as out:
                        result.write(form, out)
            except OSError as error:
                raise Usage(
                    f"--export {form}={path}: {error.strerror}.", mend="name a file that can be written"
                ) from error
        return [path.name for path in self.files or {}]

    def shown(self, result: Result) -> str | None:
        """The text that takes the usual result's place, where one was asked for."""
        return result.text(self.form) if self.form else None


def give(
    out: Output,
    exports: Exports,
    result: Result,
    text: str | Callable[[], str],
    *,
    brief: str | None = None,
) -> list[str]:
    """Write what was asked for and show the result, in its usual form or the one asked for; the files' names."""
    files = exports.write(result)
    shown = exports.shown(result)
    if shown is not None:
        replace(out, format="text").result(result.document, shown)
    else:
        out.result(result.document, text, brief=brief)
    return files


def _check(form: str, file: str) -> None:
    if form not in FORMS:
        raise Usage(
            f"--export {form} is none of {', '.join(FORMS)}.",
            mend=f"--export {FORMS[0]}=FILE, or another of them",
        )
    if form == "parquet" and not file:
        raise Usage("--export parquet is no text.", mend="name a file: --export parquet=FILE")
    package, mend = NEEDS.get(form, ("json", ""))
    if find_spec(package) is None:
        raise Usage(f"--export {form} needs {package}, which is not installed.", mend=mend)
    if file and not Path(file).parent.is_dir():
        raise Usage(f"{Path(file).parent} is no directory.", mend="name a file in one that exists")
    if file and Path(file).is_dir():
        raise Usage(f"{file} is a directory.", mend="name a file in it")
