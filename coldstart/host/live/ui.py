"""The page at /ui: the status of a host in a browser, with what changed since the page was opened as plots.

Invariant: the page holds nothing of the host; all that it shows it asks of /status, with the key that its reader types where
the host wants one, and its own policy lets it ask nobody else.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from coldstart.bench.report.page import library


@cache
def page() -> str:
    """One HTML document, the plots' library inside. Raises FileNotFoundError without Bokeh."""
    text = files(__package__).joinpath("ui.html").read_text(encoding="utf-8")
    # Not str.format: the page is full of braces. Not re.sub: the library is full of backslashes.
    return text.replace("/*library*/", library("api"), 1)
