"""Phases of a start by `coldstart up`: of its preparation, then of its server. The record of the server retains them for -v."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from coldstart.commands._options import Common

from coldstart.system import timeline
from coldstart.system.timeline import Span, Timeline

if TYPE_CHECKING:
    from coldstart.launch.up_records import UpDirectory

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
        directory.phases.unlink(missing_ok=True)
        if phases:
            directory.phases.write_text(phases, encoding="utf-8")


def show(common: Common, directory: "UpDirectory") -> None:
    """Show the recorded phases with -v."""
    try:
        common.out.detail(*directory.phases.read_text(encoding="utf-8").splitlines())
    except OSError:
        common.out.detail("The phases of its start were not recorded")
