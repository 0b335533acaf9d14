"""coldstart serve without an engine: what it prints when the server is ready, and what it records of the start."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.commands import _serving, cli
from support.engines import fake_engine, home, model
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.launch import driver
from coldstart.launch.server_process import ServerProcess
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.ipc.addresses import free_port
from coldstart.system.paths import Cache

__all__ = ["fake_engine", "home", "model"]
Serve = Callable[..., list[str]]
LOG = "(APIServer pid=7) a line of the server's log"


@pytest.fixture
def lookup(home: Path, model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    found = Lookup(model, Arguments(), Cache.at(), key())
    monkeypatch.setattr(_serving, "find", lambda *_, **__: found)
    return found


@pytest.fixture
def serve(
    lookup: Lookup, fake_engine: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Serve:
    """Return serve(*options), which ends the server as soon as it is ready and returns all lines of the terminal."""

    def end(process: ServerProcess) -> int:
        process.signal(signal.SIGTERM)
        process.wait()
        return 0

    def run(*options: str) -> list[str]:
        words = ["--on-miss", "warn", "--port", str(free_port()), *options]
        with (
            (tmp_path / "terminal").open("w+", encoding="utf-8") as terminal,
            monkeypatch.context() as patched,
        ):
            patched.setattr(sys, "stdout", terminal)
            patched.setattr(sys, "stderr", terminal)
            with pytest.raises(SystemExit) as caught:
                cli.main(["serve", str(lookup.model.path), *words])
            terminal.seek(0)
            assert caught.value.code == 0
            return terminal.read().splitlines()

    fake_engine("serves")
    monkeypatch.setattr(driver, "stay", end)
    return run


def test_no_line_of_the_log_separates_what_serve_prints_of_a_start(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advise(*_: object) -> str:
        sys.stderr.write(f"{LOG}\n")
        return "For a faster next start: coldstart template start tiny"

    monkeypatch.setattr(_serving, "advise_faster", advise)
    lines = serve("-v")
    (ready,) = [number for number, line in enumerate(lines) if line.startswith("http://")]
    assert LOG in lines[:ready]
    block = lines[ready:]
    assert any(line.startswith("For a faster next start") for line in block) and "command" in block
