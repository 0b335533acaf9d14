"""Phases of a start by `coldstart up`: of its preparation, then of its server. The record of the server retains them for -v.

Those of a start by `coldstart serve` are stored there too, for `coldstart serve --dry-run -v`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING

from coldstart.artifacts import files
from coldstart.commands._options import Common

from coldstart.errors import UsageError
from coldstart.system import timeline
from coldstart.system.timeline import Span, Timeline

if TYPE_CHECKING:
    from coldstart.launch.up_records import UpDirectory
    from coldstart.models.inspection import Lookup

_PREPARATION = "preparation"


@contextmanager
def measure(common: Common, name: str) -> Iterator[Callable[[str], None]]:
    """Show a step of the preparation, as `Output.phase`, and record it."""
    with timeline.measure(name, track=_PREPARATION), common.out.phase(name) as step:
        yield step


def draw_preparation(recorded: Timeline) -> str:
    """Return the steps of a preparation and the phases of the template that it started as bars, empty without a step."""
    from coldstart.system.drawing import draw

    if not any(span.track == _PREPARATION for span in recorded.spans):
        return ""
    # The template emits the spans of a server.
    tracks = ((span, "template" if span.track == "server" else span.track) for span in recorded.spans)
    return draw(Timeline(Span(span.name, span.start_s, span.end_s, track) for span, track in tracks)) + "\n"


def write(directory: "UpDirectory", phases: str) -> None:
    """Store the phases of the server that starts, instead of those of an earlier one."""
    with suppress(OSError):  # the server is ready, and a full disk must not end it
        directory.write_phases(phases)


def record_last(lookup: "Lookup", phases: str) -> None:
    """Store the phases of a start by `serve`, unless `up` has a server of the same arguments: the file describes that one."""
    from coldstart.launch import up_records

    with suppress(OSError, UsageError):
        if (directory := up_records.find_directory(lookup)).read() is None:
            directory.write_phases(phases)


def show_last(common: Common, lookup: "Lookup") -> None:
    """Show the phases of the last start of the look-up's model and arguments with -v, and when it was ready."""
    from coldstart.launch import up_records

    if not common.out.verbose:
        return
    directory = up_records.find_directory(lookup)
    with suppress(OSError):
        at = datetime.fromtimestamp(directory.phases.stat().st_mtime).astimezone()
        common.out.detail(f"The last start with these arguments was ready at {at:%Y-%m-%d %H:%M:%S}:")
    show(common, directory)


def show(common: Common, directory: "UpDirectory") -> None:
    """Show the recorded phases with -v."""
    try:
        common.out.detail(*files.read_text(directory.phases).splitlines())
    except (OSError, ValueError):
        common.out.detail("No phases of a start are recorded")
