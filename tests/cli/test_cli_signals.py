"""A signal ends a command even when it arrives in a callback, and a closed terminal ends a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

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
