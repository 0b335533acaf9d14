"""Output of a command: one place for all that it prints.

stdout (or ``-o FILE``) contains only the result; stderr contains progress, notes and the closing
line. JSON results have ``schema_version``.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from coldstart.commands import _progress, _tables

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.system import secrets, start_progress

SCHEMA_VERSION = 2

Format = Literal["text", "json"]
Progress = Literal["auto", "plain", "none", "json"]


@dataclass
class Output:
    """Output of one command, which supplies data and a rendering; the format decides which is printed.

    `phases` is the number of phases that the command enters, 0 if it is not known.
    """

    format: Format = "text"
    out_file: Path | None = None
    quiet: bool = False
    verbose: bool = False
    progress: Progress = "auto"
    started: float = field(default_factory=time.monotonic)
    phases: int = 0
    _entered: int = 0
    # Results and lines that `gather` holds back.
    _gathered: tuple[list[str], list[str]] | None = None

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
            self._write(printable(shown if self.out_file else _tables.wrap(shown)))

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
        """Print the output of the block at its end: the result, then all other lines at once.

        The log of a server goes to the same terminal and would separate the lines while they are computed.
        """
        results: list[str] = []
        lines: list[str] = []
        self._gathered = results, lines
        try:
            yield
        finally:
            self._gathered = None
            for text in results:
                self._write(text)
            _err(*lines)

    @contextmanager
    def phase(self, name: str, expected_s: float | None = None) -> Iterator[Callable[[str], None]]:
        """Show that the phase ``name`` runs and for how long, and that an earlier run took ``expected_s`` seconds.

        The yielded function shows a step within the phase. Text shows figures only with the time of a long phase.
        """
        mode, begin = self._progress_mode(), time.monotonic()
        self._entered += 1
        number = f"[{self._entered} of {self.phases}] " if self.phases else ""
        progress = _progress.PhaseProgress(number + name, expected_s)

        def say(event: str, seconds: float) -> None:
            _heartbeat(mode, progress, name, event, seconds)

        def step(text: str) -> None:
            progress.step = text
            if mode == "json" or not isinstance(text, start_progress.ProgressText):
                say("step", time.monotonic() - begin)

        say("begin", 0.0)
        with (
            _progress.show_on_terminal(progress, lambda text: one_line(secrets.text(text)))
            if mode == "bar"
            else _progress.repeat(lambda seconds: say("running", seconds))
        ):
            yield step
        say("end", time.monotonic() - begin)

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
        if self._gathered is None:
            _err(*lines)
        else:
            self._gathered[1].extend(lines)

    def _write(self, text: str) -> None:
        if self._gathered is not None:
            self._gathered[0].append(text)
            return
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


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows below ``headers`` in aligned columns, numbers to the right, within the width of a terminal."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]
    width = _tables.find_width()
    if rows and width is not None and sum(widths) + len(_tables.GAP) * (len(headers) - 1) > width:
        return _tables.fit(headers, cells, right, width)
    lines = [
        _tables.GAP.join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        for line in [list(headers), *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


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


def _heartbeat(mode: str, progress: _progress.PhaseProgress, name: str, event: str, seconds: float) -> None:
    if mode == "json":
        said: dict[str, object] = {"phase": name, "event": event, "seconds": seconds}
        said |= {"step": progress.step} if event == "step" else {}
        said |= {"expected_s": progress.expected_s} if progress.expected_s is not None else {}
        _err(json.dumps({"schema_version": SCHEMA_VERSION, **said}))
    elif mode == "plain" and event == "begin":
        expected = progress.expected_s
        about = f" ({expected:.0f} s the last time)" if expected is not None else ""
        _err(f"{progress.name}{about} ...")
    elif mode == "plain" and event == "step":
        _err(f"  {progress.step}")
    elif mode == "plain" and event == "running":
        _err(f"  {progress.describe(seconds)}")


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
