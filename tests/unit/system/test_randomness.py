"""Two processes forked from the same memory draw different random numbers."""

from __future__ import annotations

import multiprocessing
import os
import random

import numpy

from coldstart.system.proc import randomness


def _drawn_in_a_fork() -> list[str]:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        randomness.renew()
        key = multiprocessing.current_process().authkey.hex()
        os.write(writer, f"{random.random()} {numpy.random.random()} {key}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    said = os.read(reader, 4096).decode().split()
    os.close(reader)
    return said


def test_forks_share_no_random_state() -> None:
    one, two = _drawn_in_a_fork(), _drawn_in_a_fork()
    assert len(one) == len(two) == 3 and not {*one} & {*two}
