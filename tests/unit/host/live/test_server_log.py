"""The log of one server: only the newest part is retained while another process writes to it."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coldstart.host.live.log import Log, capture_loggers
from coldstart.host.live.server_log import BLOCK, ServerLog

WRITER = """
import sys
for number in range(int(sys.argv[1])):
    print(f"line {number:06d}", flush=True)
    if number % 1000 == 999:
        sys.stdin.readline()
"""


def test_a_log_that_another_process_writes_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    with log.path.open("ab") as sink, subprocess.Popen(
        [sys.executable, "-c", WRITER, "10000"], stdin=subprocess.PIPE, stdout=sink, text=True
    ) as writer:  # fmt: skip
        assert writer.stdin is not None
        for round_ in range(1, 11):
            while not log.path.read_bytes().endswith(b"line %06d\n" % (round_ * 1000 - 1)):
                time.sleep(0.005)
            log.bound(5000)
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 12_000 + 5000
            print(file=writer.stdin, flush=True)
    lines = log.tail(4800).splitlines()
    assert (
        lines == [f"line {number:06d}" for number in range(10_000 - len(lines), 10_000)] and len(lines) > 300
    )
    log.remove()
    assert list(tmp_path.iterdir()) == []


def test_small_or_missing_log_is_not_changed(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    log.bound()
    assert (log.tail(100), log.find_error()) == ("", "")
    log.path.write_text("INFO fine\nValueError: too little memory\n")
    log.bound()
    assert not log.before.exists() and log.find_error() == "ValueError: too little memory"
    log.remove()
    log.remove()


def test_find_error_returns_the_last_error_when_a_warning_names_another(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    log.path.write_text(
        "WARNING cannot watch files: OSError: [Errno 24] Too many open files\n"
        "INFO loading weights\n"
        "Traceback (most recent call last):\n"
        '  File "engine.py", line 7, in start\n'
        "ValueError: max_model_len 8192 exceeds the KV cache\n"
        "INFO shutting down\n"
    )
    assert log.find_error() == "ValueError: max_model_len 8192 exceeds the KV cache"


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    log = ServerLog(tmp_path / "7.log")
    log.path.write_text("token hf_abcdefghijklmnop given\n")
    assert "hf_abcdefghijklmnop" not in log.tail(100)


async def test_followed_log_goes_on_after_it_was_truncated_and_deleted(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    log.path.write_text("first line\nsecond\nthird\n")
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    lines = log.follow(10, ended)
    with log.path.open("a") as sink:
        assert await anext(lines) == "third\n"
        sink.write("x" * 2 * BLOCK)
        sink.flush()
        # A line without an end is not retained beyond a block.
        assert (await anext(lines)).startswith("xxx")
        log.bound(10)
        sink.write("after\n")
        sink.flush()
        assert (await anext(lines)).endswith("after\n")
        log.remove()
        sink.write("last")
        sink.flush()
        ended.set_result("")
        assert [line async for line in lines] == ["last"]
    assert [line async for line in log.follow(10, ended)] == []


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
