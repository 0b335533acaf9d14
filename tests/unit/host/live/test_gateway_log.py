"""The host's log."""

from __future__ import annotations

import gc
import io
import json
import logging

import pytest

from coldstart.host.live.log import Log, capture_loggers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_write_formats_text_when_the_output_is_a_terminal() -> None:
    sink = Terminal()
    Log(sink).write(
        "start", model="m", seconds=1.23456, mode=None, reason="no\x1b[31m", url="http://me:geheim@host/x"
    )
    time, line = sink.getvalue().split(" ", 1)
    assert len(time) == 8 and line.startswith("start model=m seconds=1.23 reason=")
    assert "\x1b" not in line and "geheim" not in line and line.count("\n") == 1


def test_log_is_json_without_secrets_and_never_fails() -> None:
    sink = io.StringIO()
    Log(sink).write("start", model="m", mode=None, url="http://me:geheim@host/x")
    line = json.loads(sink.getvalue())
    assert (line["event"], line["model"]) == ("start", "m") and "mode" not in line
    assert "geheim" not in sink.getvalue() and line["ts"].endswith("+00:00")
    sink.close()
    Log(sink).write("start", model="m")


def test_loggers_of_libraries_write_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # A task that an earlier test has left reports itself when it is collected.
    gc.collect()
    sink = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    uvicorn, asyncio = logging.getLogger("uvicorn.error"), logging.getLogger("asyncio")
    with capture_loggers(Log(sink)):
        try:
            raise RuntimeError("two\nlines of http://me:geheim@host/x")
        except RuntimeError:
            uvicorn.exception("Exception in ASGI application\n")
        asyncio.error("%s was never retrieved", "Task")
        asyncio.error("%d", "no number")
    uvicorn.error("after the block")
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [line["text"] for line in lines] == [
        "Exception in ASGI application",
        "Task was never retrieved",
        "%d",
    ]
    assert lines[0]["logger"] == "uvicorn.error" and lines[0]["error"].startswith("RuntimeError: two\nlines")
    assert "geheim" not in sink.getvalue()
