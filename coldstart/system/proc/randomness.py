"""Random state that must differ between processes with common memory: forked from one template, or thawed from one image."""

from __future__ import annotations

import multiprocessing
import os
import random


def renew() -> None:
    """Reseed Python's and numpy's generators and give multiprocessing a new key.

    torch's generator is unchanged: vLLM seeds it with --seed in every server.
    """
    import numpy

    random.seed()
    numpy.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
