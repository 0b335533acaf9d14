"""The examples of the Python API run against a real vLLM, with the bundle that the other tests share."""

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
from urllib.request import Request, urlopen

import pytest
from support.families import find_family, remaining
from tools.machine import PROJECT, PROMPTS, READY_S, Machine, Tokens

from coldstart.system.ipc.addresses import find_free_port

# A fork of a template would be no descendant of the example.
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_template")]
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


@pytest.mark.nightly
def test_the_example_serves_the_bundle_and_stops_the_server(
    machine: Machine, bundle: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with _running(machine, log, "python_api.py") as process:
        code = process.wait(timeout=READY_S)
    said = log.read_text(errors="replace")
    assert code == 0, said[-6000:]
    assert f"bundle: {bundle.ref}\n" in said and "fallbacks: none\n" in said
    assert re.search(r"^mode: [a-z-]+, ready in \d+\.\d\d s$", said, re.MULTILINE)
    assert re.search(r"^completion: '.+'$", said, re.MULTILINE)
    assert re.search(r"^exit code: \d+$", said, re.MULTILINE)


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
