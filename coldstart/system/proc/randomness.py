"""Random state that processes of one memory must not share: forked from one template, or thawed from one image."""

from __future__ import annotations

import multiprocessing
import os
import random


def renew() -> None:
    """Seed Python's and numpy's generators anew and give multiprocessing a new key.

    torch's generator is left: vLLM seeds it by --seed, for every server alike.
    """
    import numpy

    random.seed()
    numpy.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
