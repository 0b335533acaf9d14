"""When a server ends, its exit code has the cause and none of its processes remains."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.families import remaining
from support.waiting import wait_until
from tools.machine import READY_S, Machine, Served, Tokens

pytestmark = pytest.mark.vllm
FRESH, ENGINE = "fresh", "template-engine"
# vLLM's handler of a signal writes to the log. If the signal interrupts a write, Python's logging reports that instead.
REENTRANT = re.compile(r"(?ms)--- Logging error ---((?!^Arguments:).)*?reentrant call.*?^Arguments: .*?$")


def nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        nightly(FRESH, signal.SIGTERM, 143),
        nightly(FRESH, signal.SIGINT, 130),
        nightly(ENGINE, signal.SIGTERM, 143),
        (ENGINE, signal.SIGINT, 130),
    ],
)
def test_server_exits_with_128_plus_signal(
    machine: Machine, engine_template: None, mode: str, number: int, code: int
) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served, ThreadPoolExecutor(1) as pool:
        # An answer that is not streamed keeps its connection until it is complete.
        asked = pool.submit(_ask, served.report["url"])
        wait_until(lambda: _runs_request(served.report["url"]))
        assert served.end(number) == code
        assert asked.result() in (
            "abort",
            "500",
        )  # vLLM's engine aborts its requests, or has ended before it could
        assert "Traceback" not in REENTRANT.sub("", served.log.read_text(errors="replace"))


@pytest.mark.parametrize("mode", [nightly(FRESH), ENGINE])
def test_server_ends_when_the_supervisor_is_killed(
    machine: Machine, engine_template: None, mode: str, reference: Tokens
) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served:
        family = served.family()
        assert len(family) >= 3  # the command, the server, its engine
        assert served.end(signal.SIGKILL) == 137
        assert remaining(family) == []
    if mode == ENGINE:  # the template survives the supervisor
        with machine.serving("tiny-llama", "--mode", mode) as again:
            assert again.report["mode"] == mode and again.tokens() == reference


@pytest.mark.parametrize("mode", [nightly(FRESH), ENGINE])
def test_server_exits_1_when_the_engine_is_killed(machine: Machine, engine_template: None, mode: str) -> None:
    with machine.serving("tiny-llama", "--mode", mode) as served:
        os.kill(_engine(served), signal.SIGKILL)
        assert served.code() == 1


def test_server_exits_1_when_the_template_is_killed(machine: Machine, engine_template: None) -> None:
    with machine.serving("tiny-llama", "--mode", ENGINE) as served:
        (template,) = json.loads(machine.run("template", "status", "--format", "json"))["templates"]
        os.kill(template["pid"], signal.SIGKILL)
        assert served.code() == 1


def _ask(url: str) -> str:
    """Return the finish reason of the answer to a request for many tokens, or the status of an error."""
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 500, "ignore_eos": True}
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urlopen(request, timeout=READY_S) as answer:
            return str(json.load(answer)["choices"][0]["finish_reason"])
    except HTTPError as error:
        return str(error.code)


def _runs_request(url: str) -> bool:
    with urlopen(f"{url}/metrics", timeout=READY_S) as answer:
        return (
            re.search(r"^vllm:num_requests_running\{.*\} 1", answer.read().decode(), re.MULTILINE) is not None
        )


def _engine(served: Served) -> int:
    (engine,) = (one for one in served.family() if one.ppid() == served.report["pid"])
    return int(engine.pid)
