"""A signal ends a command even when it arrives in a callback."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLBACK = """
import os, signal, time, weakref
from coldstart.commands import cli

class Thing: pass

def callback(_):
    os.kill(os.getpid(), signal.{name})
    time.sleep(0)

cli.catch()
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


def test_other_errors_in_a_callback_are_printed() -> None:
    source = """
from coldstart.commands import cli
cli.catch()
class Thing:
    def __del__(self): 1 / 0
thing = Thing()
del thing
"""
    command = [sys.executable, "-P", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "ZeroDivisionError" in done.stderr
