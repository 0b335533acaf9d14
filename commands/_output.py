"""Output of a command: one place for all that it prints.

stdout (or ``-o FILE``) contains only the result; stderr contains progress, notes and the closing
line. JSON results have ``schema_version``.
"""

import io
import json
import re
import shutil
import sys
import textwrap
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
"""Seconds between two lines about a phase that still runs, where no terminal shows its time."""
# Columns between two columns of a table.
_GAP = 2

Format = Literal["text", "json"]
Progress = Literal["auto", "plain", "none", "json"]


@dataclass
class _Phase:
    """A phase that runs: its name, the form in which it is shown, and the last step that it reported."""

    name: str
    mode: Literal["bar", "plain", "none", "json"]
    step: str = ""
    began: float = field(default_factory=time.monotonic)

    def describe(self) -> str:
        """Return the state in one line."""
        label = "now" if isinstance(self.step, ProgressText) else "last"
        step = f"; {label}: {self.step}" if self.step else ""
        return f"{self.name}: {time.monotonic() - self.began:.0f} s{step}"

    def set_step(self, text: str) -> None:
        """Report a step. Text shows figures only with the time of a long phase."""
        self.step = text
        if self.mode == "json" or not isinstance(text, ProgressText):
            self.report("step")

    def report(self, event: Literal["begin", "step", "running", "end"]) -> None:
        """Print a line about an event, if the form has one."""
        if self.mode == "json":
            found: dict[str, object] = {
                "phase": self.name, "event": event, "seconds": time.monotonic() - self.began,
            }  # fmt: skip
            found |= {"step": self.step} if event == "step" else {}
            _err(json.dumps({"schema_version": SCHEMA_VERSION, **found}))
        elif self.mode == "plain" and event != "end":
            lines = {"begin": f"{self.name} ...", "step": f"  {self.step}", "running": f"  {self.describe()}"}
            _err(lines[event])

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(one_line(secrets.text(self.describe())), no_wrap=True, overflow="ellipsis")

    def show(self) -> AbstractContextManager[object]:
        """Show the phase in the last line of the terminal until the block ends."""
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        return Live(Spinner("dots", self), console=Console(stderr=True), transient=True)

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Report every HEARTBEAT_S that the phase runs, until the block ends."""
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
    """Output of one command, which supplies data and a rendering; the format decides which is printed."""

    format: Format = "text"
    out_file: Path | None = None
    quiet: bool = False
    verbose: bool = False
    progress: Progress = "auto"
    started: float = field(default_factory=time.monotonic)
    # Lines that `gather` holds back.
    _held: list[str] | None = None

    def result(
        self, data: Mapping[str, object], text: str | Callable[[], str], *, brief: str | None = None
    ) -> None:
        """Write the result once: ``data`` as JSON, or ``text``; with -q ``brief`` instead, if it is given."""
        if self.format == "json":
            self._write(json.dumps(public(data), indent=2, default=str))
        elif self.quiet and brief is not None:
            self._write(printable(brief))
        else:
            shown = text if isinstance(text, str) else text()
            self._write(printable(shown if self.out_file else wrap(shown)))

    def success(self, outcome: str, *, where: str | None = None, then: str | None = None) -> None:
        """Print the closing line: result, place, duration, and the next command."""
        seconds = time.monotonic() - self.started
        place = f" in {where}" if where else ""
        following = f" Next: {then}" if then else ""
        self.note(f"{outcome}{place} ({seconds:.1f} s).{following}")

    def note(self, message: str) -> None:
        """Print a line on stderr unless -q is given."""
        if not self.quiet:
            self._print(message)

    def warn(self, message: str, *more: str) -> None:
        """Print a warning on stderr, also with -q; `more` are further lines."""
        self._print(f"warning: {message}", *(f"  {line}" for line in more))

    def detail(self, *lines: str) -> None:
        """Print lines on stderr if -v is given."""
        if self.verbose and not self.quiet:
            self._print(*lines)

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Hold back all lines that the block prints, except its result, and print them together at its end.

        Otherwise lines of a server's log, which goes to the same terminal, could come between them.
        """
        lines = self._held = []
        try:
            yield
        finally:
            self._held = None
            _err(*lines)

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show that the phase ``name`` runs and for how long. The yielded function shows a step within the phase."""
        phase = _Phase(name, self._progress_mode())
        phase.report("begin")
        with phase.show() if phase.mode == "bar" else phase.repeat():
            yield phase.set_step
        phase.report("end")

    def is_animated(self) -> bool:
        """Return whether a line of the terminal shows the phase that runs."""
        return self._progress_mode() == "bar"

    def _progress_mode(self) -> Literal["bar", "plain", "none", "json"]:
        if self.progress == "auto":
            if self.quiet:
                return "none"
            # rich animates into pipes under FORCE_COLOR, so check the terminal itself.
            return "bar" if sys.stderr.isatty() and environment.TERM.read() != "dumb" else "plain"
        return self.progress

    def _print(self, *lines: str) -> None:
        if self._held is None:
            _err(*lines)
        else:
            self._held.extend(lines)

    def _write(self, text: str) -> None:
        text = secrets.text(text)
        if self.out_file is None:
            sys.stdout.write(text.rstrip("\n") + "\n")
            sys.stdout.flush()
            return
        try:
            self.out_file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"-o {self.out_file}: {error.strerror}", hint="use a file that can be written"
            ) from error


def public(data: Mapping[str, object]) -> dict[str, Any]:
    """Prepare `data` for output: add the schema version, and redact secrets, also in lists of vLLM arguments."""
    if isinstance(arguments := data.get("vllm_args"), list | tuple):
        data = {**data, "vllm_args": secrets.arguments([str(word) for word in arguments])}
    return {"schema_version": SCHEMA_VERSION, **cast("dict[str, Any]", secrets.document(data))}


class Verbatim(str):
    """Text for another program, such as a manifest or a log: it is not wrapped."""

    __slots__ = ()


def find_width() -> int | None:
    """Return the number of columns of the terminal that shows standard output, None without one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrap(text: str) -> str:
    """Return the text with lines wrapped at spaces to the width of the terminal; unchanged without one.

    A line of a label and a value, with two spaces between them, continues below its value.
    """
    width = find_width()
    if width is None or isinstance(text, Verbatim):
        return text
    return "\n".join(_wrap_line(line, width) for line in text.splitlines())


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = re.match(r" *(?:\S+(?: \S+)*  +)?", line)
    indent = len(label[0]) if label else 0
    indent = indent if indent <= width // 2 else len(line) - len(line.lstrip()) + _GAP
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows below ``headers`` in aligned columns, numbers to the right, wrapped at spaces within a terminal's width.

    If a row of the longest words is wider than the terminal, each cell has its own line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [[header, *(one_line(str(row[n])) for row in rows)] for n, header in enumerate(headers)]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    gaps, width = _GAP * (len(columns) - 1), find_width()
    if width is not None and sum(words) + gaps > width:
        name = max(map(len, headers))
        lines = [
            [f"{column[0].ljust(name)}  {column[n + 1]}".rstrip() for column in columns]
            for n in range(len(rows))
        ]
        return "\n\n".join(map("\n".join, lines))
    grid = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="")
    for n, (column, least) in enumerate(zip(columns, words, strict=True)):
        is_right = bool(rows) and all(isinstance(row[n], int | float) for row in rows)
        grid.add_column(Text(column[0]), justify="right" if is_right else "left", min_width=least)
    for row in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, row))
    whole = sum(max(map(len, column)) for column in columns) + gaps
    console = Console(
        file=io.StringIO(), width=min(width or whole, whole), color_system=None, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 bundle" or "2 bundles"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _err(*lines: str) -> None:
    sys.stderr.write("".join(one_line(secrets.text(line)) + "\n" for line in lines))
    sys.stderr.flush()


def complain(lines: Sequence[str], hint: str | None, json_code: int | None = None) -> None:
    """Print the error that ends a command, and its hint. Only the hint begins a line with its label.

    With `json_code`, the exit code, both are one line of JSON.
    """
    if json_code is not None:
        document = {"error": "\n".join(lines), "hint": hint, "exit_code": json_code}
        _err(json.dumps(public(document)))
        return
    first, *more = lines
    _err(f"error: {first}")
    for line in more:
        _err(f"  {line}")
    if hint:
        _err(f"hint: {hint}")


def one_line(text: str) -> str:
    """Return `text` as one line of a terminal: line ends and tabs are written as escapes, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable(text: str) -> str:
    """Return `text` with escapes for what would move a terminal's cursor, reverse its order or hide text.

    Such characters come from registries, weights servers and bundles. Line ends and tabs are retained: text from
    outside has passed `one_line` before.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
