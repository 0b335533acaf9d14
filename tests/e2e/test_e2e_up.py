"""coldstart up and down, and the examples of the Python API, on a real vLLM: nothing is left behind."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil
import pytest
from support.processes import find_family, remaining
from tools.machine import PROJECT, PROMPTS, READY_S, VLLM, Machine, Tokens

from coldstart.launch.completions import CompletionClient
from coldstart.system.ipc.addresses import find_free_port
from coldstart.validate.launch import HOST

pytestmark = pytest.mark.vllm


@pytest.fixture
def up(machine: Machine, bundle: Any, no_template: None) -> Iterator[dict[str, Any]]:
    """Bring tiny-llama up in the background."""
    port = str(find_free_port())
    words = ("up", "tiny-llama", "--detach", "--port", port, "--format", "json")
    yield json.loads(machine.run(*words, "--", *VLLM))
    machine.run("down")


def shown(machine: Machine, *words: str) -> dict[str, Any]:
    return dict(json.loads(machine.run(*words, "--format", "json")))


def test_up_again_finds_the_server_and_down_leaves_nothing(machine: Machine, up: dict[str, Any]) -> None:
    assert up["mode"] == "template-engine" and up["fallbacks"] == []
    client = CompletionClient(HOST, urlsplit(up["url"]).port or 0)
    assert len(client.complete(PROMPTS[0], 16).tokens) == 16
    # --detach: should it start another server, the command would end nevertheless.
    # Without arguments it would name the newest bundle of the machine, which is another test's.
    again = json.loads(machine.run("up", "tiny-llama", "--detach", "--format", "json", "--", *VLLM))
    assert again.get("already_up"), machine.error()
    assert again["url"] == up["url"] and again["mode"] == up["mode"]
    assert "with different settings" not in machine.error()
    started = find_family(again["pid"])
    assert [one.pid for one in started] == [again["pid"]]  # the template's child is the server
    started += [psutil.Process(up["pid"])]
    stopped = shown(machine, "down", "tiny-llama")
    assert [one["url"] for one in stopped["servers"]] == [up["url"]]
    assert [one["level"] for one in stopped["templates"]] == ["engine"]
    assert remaining(started) == []
    assert shown(machine, "template", "status")["templates"] == []
    assert list((machine.root / "run" / "coldstart" / "up").glob("*/*")) == []
    nothing = shown(machine, "down")
    assert nothing["servers"] == nothing["templates"] == []


@pytest.mark.usefixtures("no_template")
@pytest.mark.nightly
def test_ctrl_c_ends_the_server_and_retains_the_template(machine: Machine, bundle: Any) -> None:
    words = ("up", "tiny-llama", "--port", str(find_free_port()), "--", *VLLM)
    process = machine.start(*words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and b"template-engine, ready in" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(READY_S) == 130
    assert shown(machine, "down", "--keep-template")["templates"] == []
    (template,) = shown(machine, "template", "status")["templates"]
    assert template["ready"] and template["servers"] == []
    stopped = shown(machine, "down")
    assert stopped["servers"] == [] and [one["pid"] for one in stopped["templates"]] == [template["pid"]]


EXAMPLES = PROJECT / "examples"


@contextmanager
def _running(machine: Machine, log: Path, example: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example and check afterwards that none of its processes remains."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / example), *arguments],
            env=machine.environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=60)


def _ask(url: str, **request: Any) -> Any:
    body = json.dumps(request).encode() if request else None
    with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=READY_S) as answer:
        return json.load(answer)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> Any:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        try:
            return _ask(f"http://127.0.0.1:{port}/mode")
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"not ready in {READY_S} s\n{log.read_text(errors='replace')[-6000:]}")


@pytest.mark.usefixtures("no_template")
@pytest.mark.nightly
def test_example_serves_bundle_and_stops_the_server(machine: Machine, bundle: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _running(machine, log, "python_api.py") as process:
        code = process.wait(timeout=READY_S)
    said = log.read_text(errors="replace")
    assert code == 0, said[-6000:]
    assert f"bundle: {bundle.ref}\n" in said and "fallbacks: none\n" in said
    assert re.search(r"^mode: [a-z-]+, ready in \d+\.\d\d s$", said, re.MULTILINE)
    assert re.search(r"^completion: '.+'$", said, re.MULTILINE)
    assert said.endswith("\nexit code: 0\n")


@pytest.mark.usefixtures("no_template")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_the_application_answers_vllms_tokens_and_takes_its_server_along(
    machine: Machine, bundle: Any, reference: Tokens, tmp_path: Path, number: signal.Signals
) -> None:
    port, log = find_free_port(), tmp_path / "log"
    with _running(machine, log, "fastapi_lifespan.py", "--port", str(port)) as process:
        started = _wait_for(port, process, log)
        assert started["fallbacks"] == []
        answer = _ask(
            f"http://127.0.0.1:{port}/complete", model="tiny-llama", prompt=PROMPTS[0], max_tokens=16,
            temperature=0, return_token_ids=True,
        )  # fmt: skip
        assert tuple(answer["choices"][0]["token_ids"]) == reference[0]
        family = find_family(process.pid)
        assert started["pid"] in {one.pid for one in family} and len(family) >= 3
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
        assert remaining(family) == []
