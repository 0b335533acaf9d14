"""The pipe to which this process reports the progress of a start, as a fixture."""

import os
from collections.abc import Iterator

import pytest

from coldstart.contract.plan import READY_FD_ENV
from coldstart.system import start_progress


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Begin to report to a pipe; return its end to read from, which does not block."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    start_progress.start_reporting()
    os.close(writer)
    yield reader
    start_progress.stop_reporting()
    os.close(reader)
