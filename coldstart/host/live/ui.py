"""Page at /ui: the status of a host in a browser, with plots of the changes since the page was opened.

Invariant: the page contains no data of the host. It reads all data from /status, with an API key that the reader
enters if the host requires one, and its content security policy allows no other connection.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from coldstart.bench.report.page import library


@cache
def page() -> str:
    """Return the page as one HTML document that includes the plotting library. Raises FileNotFoundError without Bokeh."""
    text = files(__package__).joinpath("ui.html").read_text(encoding="utf-8")
    # str.format fails on the page's braces, and re.sub on the library's backslashes.
    return text.replace("/*library*/", library("api"), 1)
