"""A server that dies before it reports readiness, or never reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import server_process

FakeEngine = Callable[[str], None]


def acknowledged(behaviour: str, log: Path, timeout: float | None = 20) -> server_process.ReadyServer:
    with log.open("wb") as output:
        process, reader = server_process.start_fresh(LaunchPlan([behaviour, "--port", "9"]), output)
    return server_process.await_readiness(process, reader, time.monotonic(), timeout)


def test_acknowledged_names_the_cause_that_the_engine_reported(
    fake_engine: FakeEngine, tmp_path: Path
) -> None:
    fake_engine("dies-of")
    with pytest.raises(
        CommandFailedError, match="before it was ready: ValueError: no space for the KV cache"
    ):
        acknowledged("dies-of", tmp_path / "log")


def test_launch_fails_when_the_server_is_never_ready(fake_engine: FakeEngine, tmp_path: Path) -> None:
    fake_engine("never-ready")
    with (tmp_path / "log").open("wb") as output:
        process, reader = server_process.start_fresh(LaunchPlan(["never-ready"]), output)
    with pytest.raises(CommandFailedError, match=r"not ready within 0\.3 s and was killed") as caught:
        server_process.await_readiness(process, reader, time.monotonic(), 0.3)
    assert caught.value.hint == "allow more time with --ready-timeout SECONDS"
    assert process.wait() == 137
