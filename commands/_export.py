"""Write a report as JSON, CSV, an HTML page or Markdown, for ``--export FORM=FILE``.

Invariant: an unknown form and a missing directory are reported before the command begins its work. A file is complete, or
as it was before.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coldstart.artifacts.files import open_replacement
from coldstart.commands._output import Output, Verbatim, table

from coldstart.bench.report import FORMATS, Report
from coldstart.errors import UsageError


@dataclass(frozen=True)
class Exports:
    """Forms of one `--export`: at most one that replaces the usual result, and any number of files."""

    form: str | None = None
    files: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Sequence[str]) -> "Exports":
        """Parse the values of --export. Raises UsageError if a form is unknown or a file cannot be written."""
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

    def keep(self, report: Report) -> None:
        """Write an incomplete result to every regular file, which the complete one replaces. Raises the errors of `write`."""
        files = {path: form for path, form in self.files.items() if path.is_file() or not path.exists()}
        replace(self, files=files).write(report)

    def write(self, report: Report) -> list[str]:
        """Write every file and return their names. Raises UsageError for one that cannot be written."""
        for path, form in self.files.items():
            content = report.render(form).encode()
            try:
                if path.exists() and not path.is_file():  # a pipe or a device
                    path.write_bytes(content)
                else:
                    with open_replacement(path) as out:
                        out.write(content)
            except OSError as error:
                raise UsageError(
                    f"--export {form}={path}: {error.strerror}", hint="use a file that can be written"
                ) from error
        return [path.name for path in self.files]


def give(out: Output, exports: Exports, report: Report) -> list[str]:
    """Write the exported files, show the result as tables and notes or in its exported form, and return the files' names.

    Its JSON is one line: the last line of a log is the result.
    """
    files, plain = exports.write(report), replace(out, format="text")
    if exports.form is not None:
        plain.result(report.document, Verbatim(report.render(exports.form)))
    elif out.format == "json":
        plain.result(report.document, Verbatim(json.dumps(report.document, default=str)))
    else:
        tables = "\n\n".join(table(*shown) for shown in report.tables)
        out.result(report.document, "\n".join([tables, "", *report.notes]))
    return files


def _check(form: str, file: str) -> None:
    if form not in FORMATS:
        raise UsageError(
            f"unknown form in --export {form}: the forms are {', '.join(FORMATS)}",
            hint=f"--export {FORMATS[0]}=FILE, or another of them",
        )
    if file and not Path(file).parent.is_dir():
        raise UsageError(
            f"cannot write {file}: {Path(file).parent} is not a directory",
            hint="use a file in a directory that exists",
        )
    if file and Path(file).is_dir():
        raise UsageError(f"cannot write {file}: it is a directory", hint="use a file in it")
