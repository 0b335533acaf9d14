"""A node without an API reports readiness before vLLM's function runs, which may last for days."""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

import pytest

from coldstart.contract.fallback import Fallback, encode
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.vllm.engine import headless

FALLBACKS = [Fallback("bundle", "none")]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Namespace], None]], None]:
    """Return stand_in(run), which replaces vLLM's `run_headless`."""

    def install(run: Callable[[Namespace], None]) -> None:
        module = ModuleType("vllm.entrypoints.cli.serve")
        monkeypatch.setattr(module, "run_headless", run, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


StandIn = Callable[[Callable[[Namespace], None]], None]


def test_readiness_is_reported_before_vllm_runs(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    lines: list[bytes] = []

    def run(_: Namespace) -> None:
        assert READY_FD_ENV not in os.environ  # no child may report a second time
        lines.extend((os.read(reader, 1 << 16), os.read(reader, 1)))

    stand_in(run)
    assert headless.run(Namespace(), LaunchPlan([], fallbacks=FALLBACKS)) == 0
    os.close(reader)
    line, rest = lines
    assert line.endswith(b"\n") and rest == b""
    report = json.loads(line)
    assert report["headless"] is True and report["tokens"] == [] and report["fallbacks"] == encode(FALLBACKS)
    assert report.get("canary") is None


def test_vllm_runs_as_its_own_command_would_start_it(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(READY_FD_ENV, raising=False)
    given = Namespace(node_rank=1, api_server_count=None)
    seen: list[tuple[Namespace, int, bool]] = []
    stand_in(lambda args: seen.append((args, args.api_server_count, gc.isenabled())))
    gc.disable()
    try:
        headless.run(given, LaunchPlan([]))
    finally:
        gc.enable()
    assert seen == [(given, 0, True)]
