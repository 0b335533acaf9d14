"""Show that a phase runs: a line with the elapsed time on a terminal, else lines of text or JSON, repeated while it runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coldstart.system.start_progress import ProgressText

HEARTBEAT_S = 60.0
"""Seconds between two lines about a phase that still runs, where no terminal shows its time."""


@dataclass
class PhaseProgress:
    """State of a phase: its name, and the last step that it reported."""

    name: str
    step: str = ""

    def describe(self, seconds: float) -> str:
        """Return the state after `seconds` in one line."""
        label = "now" if isinstance(self.step, ProgressText) else "last"
        step = f"; {label}: {self.step}" if self.step else ""
        return f"{self.name}: {seconds:.0f} s{step}"


@contextmanager
def show_on_terminal(progress: PhaseProgress, sanitize: Callable[[str], str]) -> Iterator[None]:
    """Show the phase in the last line of the terminal."""
    from rich.console import Console
    from rich.progress import Progress as Display
    from rich.progress import ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class State(ProgressColumn):
        def render(self, task: Task) -> Text:
            text = Text(sanitize(progress.describe(task.elapsed or 0.0)), no_wrap=True)
            text.truncate(max(1, console.width - 3), overflow="ellipsis")
            return text

    console = Console(stderr=True)
    with Display(SpinnerColumn(), State(), console=console, transient=True) as display:
        display.add_task("")
        yield


@contextmanager
def repeat(show: Callable[[float], None], interval_s: float | None = None) -> Iterator[None]:
    """Call `show` with the elapsed seconds in every interval, by default HEARTBEAT_S, until the block ends."""
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(interval_s or HEARTBEAT_S):
            show(time.monotonic() - began)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
