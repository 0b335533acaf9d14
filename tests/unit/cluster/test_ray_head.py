"""The first node as `fleet up` sees it: a process that starts, or says why not, and may end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coldstart.cluster.ray_head import RayHead
from coldstart.errors import CommandFailed

# What `ray start --block` prints, Ray 2.56.
STARTED = "Local node IP: 192.0.2.7\\n--------\\nRay runtime started.\\n--------"
ENDED = (
    "Traceback (most recent call last):\\n  File x\\n"
    "RuntimeError: Failed to bind to address 127.0.0.1:36971; set GRPC_VERBOSITY\\n\\n"
    "ERR scripts.py:1315 -- Remaining processes will be killed."
)


def head(tmp_path: Path, program: str) -> RayHead:
    log = tmp_path / "head.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=out)
    return RayHead(process, log, 6380, {})


def test_it_is_where_ray_says_it_is(tmp_path: Path) -> None:
    made = head(tmp_path, f"print('{STARTED}', flush=True); import time; time.sleep(60)")
    try:
        made.wait()
        assert made.address == "192.0.2.7:6380" and not made.ended()
    finally:
        made.end()
    assert made.ended()


def test_one_that_ends_at_once_is_refused_with_its_own_reason(tmp_path: Path) -> None:
    made = head(tmp_path, f"print('{ENDED}')")
    with pytest.raises(CommandFailed, match=r"did not start on this machine: RuntimeError: Failed to bind"):
        made.wait()


def test_one_that_says_nothing(tmp_path: Path) -> None:
    made = head(tmp_path, "")
    made.process.wait()
    assert made.ended() and made.last_words() == "it did not say why"


def test_one_that_does_not_listen_to_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "head.log"
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=out, start_new_session=True)
    made = RayHead(process, log, 6380, {})
    while "up" not in log.read_text():
        pass
    monkeypatch.setattr("coldstart.cluster.ray_head.END_S", 0.2)
    made.end()
    assert process.returncode == -9
