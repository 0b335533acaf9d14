"""Write reports as JSON, CSV, HTML or Markdown (``--export FORMAT=FILE``).

Invariants: an unknown format or a missing directory is reported before the command begins its work. A failed export leaves
the previous file unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts.files import open_replacement
from coldstart.commands._output import Output, format_table, require_writable

from coldstart.bench.report import FORMATS, Report
from coldstart.errors import UsageError

Export = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar="FORMAT[=FILE]",
        help="Print the result as json, csv, html or markdown, or write it to a file with FORMAT=FILE. Repeatable.",
    ),
]


@dataclass(frozen=True)
class ExportTargets:
    """Parsed `--export` options: at most one format that replaces the printed result, and the format of each file."""

    result_format: str | None = None
    files: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Export) -> "ExportTargets":
        """Parse the values of --export. Raises UsageError if a format is unknown or a file cannot be written."""
        pairs = [value.partition("=")[::2] for value in values or ()]
        for form, file in pairs:
            _check_export(form, file)
        results = [form for form, file in pairs if not file]
        if len(results) > 1:
            raise UsageError(
                "only one --export can omit the file, because its report replaces the printed result",
                hint="write the other exports to files, such as --export html=FILE",
            )
        return cls(next(iter(results), None), {Path(file): form for form, file in pairs if file})

    def write_partial(self, report: Report) -> None:
        """Write an incomplete report to each regular file. The complete report replaces it later.

        Raises the errors of `write`.
        """
        files = {path: form for path, form in self.files.items() if path.is_file() or not path.exists()}
        replace(self, files=files).write(report)

    def write(self, report: Report) -> list[str]:
        """Write all files and return their names. Raises UsageError if a file cannot be written."""
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
                    f"cannot write --export {form}={path}: {error.strerror}", hint="use a writable file"
                ) from error
        return [path.name for path in self.files]


def write_report(out: Output, exports: ExportTargets, report: Report) -> list[str]:
    """Write the exported files, print the report, and return the names of the files.

    JSON is printed as a single line, so that the last line of a log is the result.
    """
    files, plain = exports.write(report), replace(out, format="text")
    if exports.result_format is not None:
        plain.print_result(report.document, report.render(exports.result_format))
    elif out.format == "json":
        plain.print_result(report.document, json.dumps(report.document, default=str))
    else:
        tables = "\n\n".join(format_table(headers, rows) for headers, rows in report.tables)
        out.print_result(report.document, "\n".join([tables, "", *report.notes]))
    return files


def _check_export(form: str, file: str) -> None:
    if form not in FORMATS:
        raise UsageError(
            f"unknown format in --export {form}: expected one of {', '.join(FORMATS)}",
            hint=f"use --export {FORMATS[0]}=FILE",
        )
    if file:
        require_writable(Path(file))
