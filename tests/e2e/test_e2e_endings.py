"""When a server ends, its exit code has the cause and none of its processes remains."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tools.machine import Machine, Served, Tokens, remaining

pytestmark = pytest.mark.vllm
MODES = ("fresh", "template-engine")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, engine_template: None) -> str:
    return str(request.param)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_server_exits_with_128_plus_signal(machine: Machine, mode: str, number: int, code: int) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served:
        assert served.end(number) == code


def test_server_ends_when_the_supervisor_is_killed(machine: Machine, mode: str, reference: Tokens) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served:
        family = served.family()
        assert len(family) >= 3  # the command, the server, its engine
        assert served.end(signal.SIGKILL) == 137
        assert remaining(family) == []
    if mode == "template-engine":  # the template survives the supervisor
        with machine.serving("tiny-llama", "--mode", mode) as again:
            assert again.report["mode"] == mode and again.tokens() == reference


def test_server_exits_1_when_the_engine_is_killed(machine: Machine, mode: str) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served:
        os.kill(_engine(served), signal.SIGKILL)
        assert served.code() == 1


def test_server_exits_1_when_the_template_is_killed(machine: Machine, engine_template: None) -> None:
    with machine.serving("tiny-llama", "--mode", "template-engine") as served:
        (template,) = json.loads(machine.run("template", "status", "--format", "json"))["templates"]
        os.kill(template["pid"], signal.SIGKILL)
        assert served.code() == 1


def _engine(served: Served) -> int:
    (engine,) = (one for one in served.family() if one.parent == served.report["pid"])
    return int(engine.pid)
