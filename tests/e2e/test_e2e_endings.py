"""When a server ends or hangs, its exit code or its replacement shows the cause, and none of its processes remains."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from support.processes import has_ended, remaining, wait_until
from tools.machine import EAGER, READY_S, Machine, Served, Tokens

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
        asked = pool.submit(_complete, served.report["url"], 500)
        wait_until(lambda: _runs_request(served.report["url"]))
        assert served.end(number) == code
        status, document = asked.result()
        # vLLM's engine aborts its requests, or has ended before it could.
        assert status == 500 or document["choices"][0]["finish_reason"] == "abort"
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


def _runs_request(url: str) -> bool:
    with urlopen(f"{url}/metrics", timeout=READY_S) as answer:
        return (
            re.search(r"^vllm:num_requests_running\{.*\} 1", answer.read().decode(), re.MULTILINE) is not None
        )


def _engine(served: Served) -> int:
    (engine,) = (one for one in served.family() if one.ppid() == served.report["pid"])
    return int(engine.pid)


FILE = f"""
memory = "8GiB"
runtime_template = false
hang_timeout_s = 20
[models.tiny-llama]
args = {json.dumps(EAGER)}
on_miss = "warn"
mode = "fresh"
"""


def _complete(url: str, tokens: int) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "tiny-llama",
        "prompt": "Once",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json"}
    request = Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=READY_S) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def _model(url: str) -> dict[str, Any]:
    with urlopen(url + "/status", timeout=60) as answer:
        (model,) = json.loads(answer.read())["models"]
        return dict(model)


def _process(api: psutil.Process, part: str) -> psutil.Process:
    return api if part == "api" else max(api.children(recursive=True), key=lambda one: one.memory_info().rss)


@pytest.mark.nightly
def test_stopped_server_is_replaced(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(FILE)
    with machine.gateway("host", "--host-file", str(file)) as (process, url, log):
        first = _complete(url, 16)
        assert first[0] == 200, first
        text = first[1]["choices"][0]["text"]
        for part in ("engine", "api"):
            api = psutil.Process(_model(url)["pid"])
            answers: list[tuple[int, dict[str, Any]]] = []
            asking = threading.Thread(target=lambda to=answers: to.append(_complete(url, 400)))
            asking.start()
            wait_until(lambda: _model(url)["in_flight"])
            os.kill(_process(api, part).pid, signal.SIGSTOP)
            asking.join(READY_S)
            ((status, document),) = answers
            assert status == 502 and "hung and was killed" in document["error"]["message"], document
            assert "suspended by a signal" in log.read_text()
            wait_until(partial(has_ended, api.pid))
            again = _complete(url, 16)
            assert again[0] == 200 and again[1]["choices"][0]["text"] == text, again
    assert process.returncode == 143, log.read_text()
