"""Output of the commands: results, notes, warnings, errors and progress.

stdout (or ``-o FILE``) contains only the result. stderr contains progress, notes and the closing line. JSON results contain
``schema_version``.
"""

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.system import secrets
from coldstart.system.start_progress import ProgressText

SCHEMA_VERSION = 2
HEARTBEAT_S = 60.0
"""Interval, in seconds, of lines about a running phase when no terminal animation shows it."""
# Spaces between two columns of a table.
_GAP = 2

Format = Literal["text", "json"]
Progress = Literal["auto", "plain", "none", "json"]


@dataclass
class _Phase:
    """Running phase of a command: its name, the form in which it is shown, and the last step that it reported."""

    name: str
    mode: Literal["bar", "plain", "none", "json"]
    step: str = ""
    began: float = field(default_factory=time.monotonic)

    def describe(self) -> str:
        """Return the name, the elapsed seconds and the last step in one line."""
        label = "now" if isinstance(self.step, ProgressText) else "last"
        step = f"; {label}: {self.step}" if self.step else ""
        return f"{self.name}: {time.monotonic() - self.began:.0f} s{step}"

    def report_step(self, text: str) -> None:
        """Record a step and print it. Plain output shows a progress line only in the periodic lines of a long phase."""
        self.step = text
        if self.mode == "json" or not isinstance(text, ProgressText):
            self.report("step")

    def report(self, event: Literal["begin", "step", "running", "end"]) -> None:
        """Print a line about an event, unless the selected form of progress output omits this event."""
        if self.mode == "json":
            seconds = time.monotonic() - self.began
            document: dict[str, object] = {"phase": self.name, "event": event, "seconds": seconds}
            document |= {"step": self.step} if event == "step" else {}
            _print_to_stderr(json.dumps({"schema_version": SCHEMA_VERSION, **document}))
        elif self.mode == "plain" and event != "end":
            lines = {"begin": f"{self.name} ...", "step": f"  {self.step}", "running": f"  {self.describe()}"}
            _print_to_stderr(lines[event])

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(escape_line(secrets.redact_text(self.describe())), no_wrap=True, overflow="ellipsis")

    def animate(self) -> AbstractContextManager[object]:
        """Show the phase in the last line of the terminal until the block ends."""
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        return Live(Spinner("dots", self), console=Console(stderr=True), transient=True)

    @contextmanager
    def report_regularly(self) -> Iterator[None]:
        """Print a line every HEARTBEAT_S seconds until the block ends."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT_S):
                self.report("running")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@dataclass
class Output:
    """Output of one command. `format` determines whether a result is printed as text or as JSON."""

    format: Format = "text"
    out_file: Path | None = None
    quiet: bool = False
    verbose: bool = False
    progress: Progress = "auto"
    started: float = field(default_factory=time.monotonic)

    def print_result(
        self, data: Mapping[str, object], text: str | Callable[[], str], *, brief: str | None = None
    ) -> None:
        """Print the result: ``data`` in JSON format, otherwise ``text``, or ``brief`` with -q."""
        if self.format == "json":
            self._write(json.dumps(prepare_document(data), indent=2, default=str))
        elif self.quiet and brief is not None:
            self._write(escape_control_characters(brief))
        else:
            self._write(escape_control_characters(text if isinstance(text, str) else text()))

    def print_success(self, outcome: str, *, where: str | None = None, then: str | None = None) -> None:
        """Print the closing line: the outcome, the location of the result, the elapsed seconds, and the next command."""
        seconds = time.monotonic() - self.started
        place = f" in {where}" if where else ""
        following = f" Next: {then}" if then else ""
        self.print_note(f"{outcome}{place} ({seconds:.1f} s).{following}")

    def print_note(self, message: str) -> None:
        """Print a line on stderr unless -q is set."""
        if not self.quiet:
            _print_to_stderr(message)

    def warn(self, message: str, *more: str) -> None:
        """Print a warning, which may have several lines, on stderr, even with -q."""
        _print_to_stderr(f"warning: {message}", *(f"  {line}" for line in more))

    def print_details(self, *lines: str) -> None:
        """Print lines on stderr if -v is set."""
        if self.verbose and not self.quiet:
            _print_to_stderr(*lines)

    @contextmanager
    def show_phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show the phase ``name`` and its elapsed time until the block ends; yield a function that reports a step."""
        phase = _Phase(name, self._progress_mode())
        phase.report("begin")
        with phase.animate() if phase.mode == "bar" else phase.report_regularly():
            yield phase.report_step
        phase.report("end")

    def is_animated(self) -> bool:
        """Return whether the terminal shows the running phase as an animated line."""
        return self._progress_mode() == "bar"

    def _progress_mode(self) -> Literal["bar", "plain", "none", "json"]:
        if self.progress == "auto":
            if self.quiet:
                return "none"
            # rich animates into pipes under FORCE_COLOR, so check the terminal itself.
            return "bar" if sys.stderr.isatty() and environment.TERM.read() != "dumb" else "plain"
        return self.progress

    def _write(self, text: str) -> None:
        text = secrets.redact_text(text)
        if self.out_file is None:
            sys.stdout.write(text.rstrip("\n") + "\n")
            sys.stdout.flush()
            return
        try:
            self.out_file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write -o {self.out_file}: {error.strerror}", hint="use a writable file"
            ) from error


def require_writable(file: Path) -> None:
    """Raise UsageError unless `file` can be created or replaced. Called before the work whose result it will contain."""
    directory = file.absolute().parent
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a directory", hint=f"use a file, such as {file}/report")
    # A pipe or a device is not replaced.
    if not os.access(f"{directory}/.", os.W_OK) and (file.is_file() or not file.exists()):
        raise UsageError(
            f"cannot write {file}: the directory does not exist or is not writable",
            hint=f"run `mkdir -p {directory}`, or use another file",
        )


def prepare_document(data: Mapping[str, object]) -> dict[str, Any]:
    """Return `data` with the schema version, and with secrets redacted; `vllm_args` is redacted as an argument list."""
    if isinstance(arguments := data.get("vllm_args"), list | tuple):
        data = {**data, "vllm_args": secrets.redact_arguments([str(word) for word in arguments])}
    return {"schema_version": SCHEMA_VERSION, **cast("dict[str, Any]", secrets.redact_document(data))}


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a table that fits the terminal at stdout, with aligned columns and right-aligned numbers.

    Only the widest column is wrapped, and no word is divided, so a table can be wider than the terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [[header, *(escape_line(str(row[n])) for row in rows)] for n, header in enumerate(headers)]
    lengths = [max(map(len, column)) for column in columns]
    widest = lengths.index(max(lengths))
    grid = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="")
    for n, column in enumerate(columns):
        is_right = bool(rows) and all(isinstance(row[n], int | float) for row in rows)
        grid.add_column(Text(column[0]), justify="right" if is_right else "left", no_wrap=n != widest)
    for row in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, row))
    width = sum(lengths) + _GAP * len(columns)
    if sys.stdout.isatty():
        longest_word = max(len(word) for cell in columns[widest] for word in (cell.split() or [""]))
        least = width - lengths[widest] + longest_word
        width = max(min(width, shutil.get_terminal_size().columns), least)
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 bundle", "2 bundles"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(count: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _print_to_stderr(*lines: str) -> None:
    sys.stderr.write("".join(escape_line(secrets.redact_text(line)) + "\n" for line in lines))
    sys.stderr.flush()


def print_error(lines: Sequence[str], hint: str | None, json_code: int | None = None) -> None:
    """Print the error that ends a command, and its hint.

    If the exit code `json_code` is given, print one line of JSON instead of text.
    """
    if json_code is not None:
        document = {"error": "\n".join(lines), "hint": hint, "exit_code": json_code}
        _print_to_stderr(json.dumps(prepare_document(document)))
        return
    first, *more = lines
    _print_to_stderr(f"error: {first}")
    for line in more:
        _print_to_stderr(f"  {line}")
    if hint:
        _print_to_stderr(f"hint: {hint}")


def escape_line(text: str) -> str:
    """Escape control characters, including newlines and tabs, so that `text` is a single line in a terminal."""
    return escape_control_characters(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_control_characters(text: str) -> str:
    """Escape characters that would move the cursor of a terminal, change the text direction or hide text.

    Registries, weights servers and bundles can contain such characters. Newlines and tabs remain, because `escape_line`
    has already escaped those that come from outside.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
