"""stdout contains only the result, in each output format; a signal or a closed terminal ends a command in order."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.commands import _output
from coldstart.commands._output import Output
from support.processes import wait_until
from tools.command_line import Run
from tools.forked import coldstart


def test_last_line_has_place_duration_and_next_command(run: Run, bundle: Bundle) -> None:
    last = run("prune").stderr.splitlines()[-1]
    assert "bundles" in last
    assert " s). Next: coldstart list" in last


def test_terminal_shows_a_progress_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    program = [sys.executable, "-m", "coldstart.commands.cli", "doctor", "--format", "json"]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=slave, check=False, timeout=60)
    os.close(slave)
    shown = os.read(master, 1 << 16)
    os.close(master)
    assert re.search(rb"examine this machine: \d+ s", shown)
    assert b"examine this machine ..." not in shown
    assert json.loads(done.stdout)["schema_version"] == 2


def test_closed_streams_fail_no_command(home: Path) -> None:
    listing = [sys.executable, "-P", "-m", "coldstart.commands.cli", "list"]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *listing]
    assert subprocess.run(shell, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("mode", "expected"), [("plain", ["build ...", "  half: 3.0 s"]), ("none", [])])
def test_phase_prints_its_steps(capsys: pytest.CaptureFixture[str], mode: Any, expected: list[str]) -> None:
    with Output(progress=mode).show_phase("build") as step:
        step("half: 3.0 s")
    assert capsys.readouterr().err.splitlines() == expected


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_a_long_phase_repeats_its_time_and_last_step(
    mode: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output, "HEARTBEAT_S", 0.01)
    lines: list[str] = []

    def is_repeated() -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return any('"running"' in line or "; last: " in line for line in lines)

    with Output(progress=mode).show_phase("build") as step:
        step("compile: 3.0 s")
        wait_until(is_repeated)
    if mode == "plain":
        assert "  build: 0 s; last: compile: 3.0 s" in lines
    else:
        beats = [one for one in map(json.loads, lines) if one["event"] == "running"]
        assert beats[0]["phase"] == "build"


def test_flag_overrides_the_environment(
    run: Run, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("COLDSTART_LIST_FORMAT", "json")
    assert json.loads(run("list").stdout)["bundles"]
    assert run("list", "--format", "text").stdout.startswith("bundle")


def show_on_terminal(*words: str) -> list[str]:
    """Return the lines that a command prints on a terminal of COLUMNS columns."""
    master, slave = os.openpty()
    program = [sys.executable, "-m", "coldstart.commands.cli", *words]
    with subprocess.Popen(program, stdout=slave, stderr=subprocess.DEVNULL):
        os.close(slave)
        parts = []
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(master, 1 << 16):
                parts.append(part)
    os.close(master)
    return b"".join(parts).decode().splitlines()


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize(
    "words",
    [
        "list",
        "trust list",
        "trust why org/tiny",
        "inspect org/tiny",
        "inspect org/tiny --key",
        "doctor",
        "prefetch status",
        "template status",
    ],
)
def test_a_narrow_terminal_shows_whole_words(
    words: str, width: int, home: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = show_on_terminal(*words.split())
    piped = coldstart(words.split(), home).stdout
    # Figures of the machine may differ between two runs.
    words_of_both = {word for word in piped.split() if not any(map(str.isdigit, word))}
    assert words_of_both <= set(" ".join(lines).split())


def test_a_table_fits_the_terminal_as_far_as_its_words_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = [("cpu", "a processor with many vector extensions"), ("memory", "31 GiB")]
    monkeypatch.setenv("COLUMNS", "24")
    assert max(map(len, _output.format_table(("name", "what"), rows).splitlines())) <= 24
    monkeypatch.setenv("COLUMNS", "9")
    assert "extensions" in _output.format_table(("name", "what"), rows).split()


CALLBACK = """
import os, signal, time, weakref
from coldstart.commands import cli

class Thing: pass

def callback(_):
    os.kill(os.getpid(), signal.{name})
    time.sleep(0)

cli.install_signal_handlers()
thing = Thing()
reference = weakref.ref(thing, callback)
try:
    del thing
    for _ in range(200):
        time.sleep(0.05)
finally:
    print("ended in order")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_in_a_callback_ends_the_command(name: str, code: int) -> None:
    command = [sys.executable, "-P", "-c", CALLBACK.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "ended in order\n", "")


class TerminalHost:
    """`coldstart host` of one model that never starts, with a pseudo-terminal as its controlling terminal."""

    def __init__(self, home: Path, *prefix: str) -> None:
        file = home / "host.toml"
        file.write_text(
            "memory = '9GiB'\nruntime_template = false\n[models.a]\nargs = []\nmemory = '4GiB'\nstart_s = 1.0\n"
        )
        self.log = home / "host.log"
        self.master, slave = os.openpty()
        command = [sys.executable, "-P", "-m", "coldstart.commands.cli", "host", "--host-file", str(file)]
        # The tests may run below nohup, whose ignored SIGHUP every process inherits.
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["env", "--default-signal=HUP", "setsid", "--ctty", *prefix, *command, "--port", "0"],
                stdin=slave,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        os.close(slave)
        self.wait_for("listening")

    def wait_for(self, event: str) -> None:
        wait_until(lambda: f'"{event}"' in self.log.read_text())

    def close_terminal(self) -> None:
        os.close(self.master)
        self.master = -1

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.master >= 0:
            self.close_terminal()


@pytest.fixture
def start_host(home: Path) -> Iterator[Callable[..., TerminalHost]]:
    started: list[TerminalHost] = []

    def start(*prefix: str) -> TerminalHost:
        started.append(TerminalHost(home, *prefix))
        return started[-1]

    yield start
    for host in started:
        host.end()


@pytest.mark.slow
def test_host_stops_in_order_when_its_terminal_closes(start_host: Callable[..., TerminalHost]) -> None:
    host = start_host()
    host.process.send_signal(signal.SIGHUP)
    host.wait_for("configuration read")
    host.close_terminal()
    assert host.process.wait(60) == 129
    assert "SIGHUP" in host.log.read_text() and '"ended"' in host.log.read_text()


@pytest.mark.slow
def test_host_of_nohup_reloads_when_its_terminal_closes(start_host: Callable[..., TerminalHost]) -> None:
    host = start_host("nohup")
    host.close_terminal()
    host.wait_for("configuration read")
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(60) == 143
