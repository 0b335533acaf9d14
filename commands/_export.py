"""Write a result as JSON, CSV, an HTML page or Markdown, for ``--export FORM=FILE``.

Invariant: an unknown form and a missing directory are reported before the command begins its work. A file is complete, or
as it was before.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from coldstart.artifacts.files import replacing
from coldstart.commands._output import Output
from coldstart.commands._tables import Verbatim

from coldstart.bench.report import markdown
from coldstart.bench.report.page import page, table
from coldstart.bench.report.table import Table
from coldstart.errors import UsageError

FORMS = ("json", "csv", "html", "markdown")


@dataclass(frozen=True)
class Result:
    """Result of a command. `document` is its JSON; a result without `page` or `markdown` renders its table."""

    title: str
    document: Mapping[str, Any]
    table: Table
    page: Callable[[], str] | None = None
    markdown: Callable[[], str] | None = None

    def text(self, form: str) -> str:
        """Render the result in any form."""
        if form == "json":
            return json.dumps(self.document, indent=2, default=str)
        if form == "csv":
            self.table.write_csv(out := StringIO())
            return out.getvalue()
        if form == "html":
            shown = self.page or (lambda: page(self.title, table(self.table.columns, self.table.texts())))
            return shown()
        return self.markdown() if self.markdown else self._markdown()

    def _markdown(self) -> str:
        lines = markdown.table(list(self.table.columns), self.table.texts())
        return "\n".join([f"# {self.title}", "", *lines, ""])

    def write(self, form: str, out: IO[bytes]) -> None:
        """Write the result in any form, as UTF-8 where it is text."""
        if form == "csv":
            text = TextIOWrapper(out, encoding="utf-8", newline="")
            self.table.write_csv(text)
            text.detach()
        else:
            out.write(self.text(form).encode() + b"\n" * (form == "json"))


@dataclass(frozen=True)
class Exports:
    """Forms of one `--export`: at most one that replaces the usual result, and any number of files."""

    form: str | None = None
    files: Mapping[Path, str] | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> "Exports":
        """Parse the values of --export. Raises UsageError for a form or a file that cannot be written."""
        pairs = [item.partition("=")[::2] for item in given]
        for form, file in pairs:
            _check(form, file)
        results = [form for form, file in pairs if not file]
        if len(results) > 1:
            raise UsageError(
                "only one --export can replace the result",
                hint="give each an output file: --export html=FILE",
            )
        return cls(next(iter(results), None), {Path(file): form for form, file in pairs if file})

    @property
    def forms(self) -> set[str]:
        """Return all forms, of files and of the result."""
        return {*(self.files or {}).values(), *([self.form] if self.form else [])}

    def write(self, result: Result) -> list[str]:
        """Write every file and return their names. Raises UsageError for one that cannot be written."""
        for path, form in (self.files or {}).items():
            try:
                if path.exists() and not path.is_file():  # a pipe or a device
                    with path.open("wb") as out:
                        result.write(form, out)
                else:
                    with replacing(path) as out:
                        result.write(form, out)
            except OSError as error:
                raise UsageError(
                    f"--export {form}={path}: {error.strerror}", hint="use a file that can be written"
                ) from error
        return [path.name for path in self.files or {}]

    def shown(self, result: Result) -> str | None:
        """Return the text that replaces the usual result, or None if no form replaces it."""
        return result.text(self.form) if self.form else None


def give(
    out: Output,
    exports: Exports,
    result: Result,
    text: str | Callable[[], str],
    *,
    brief: str | None = None,
) -> list[str]:
    """Write the exported files, show the result in its usual or its exported form, and return the files' names."""
    files = exports.write(result)
    shown = exports.shown(result)
    if shown is not None:
        replace(out, format="text").result(result.document, Verbatim(shown))
    else:
        out.result(result.document, text, brief=brief)
    return files


def _check(form: str, file: str) -> None:
    if form not in FORMS:
        raise UsageError(
            f"unknown form in --export {form}: the forms are {', '.join(FORMS)}",
            hint=f"--export {FORMS[0]}=FILE, or another of them",
        )
    if file and not Path(file).parent.is_dir():
        raise UsageError(
            f"cannot write {file}: {Path(file).parent} is not a directory",
            hint="use a file in a directory that exists",
        )
    if file and Path(file).is_dir():
        raise UsageError(f"cannot write {file}: it is a directory", hint="use a file in it")
