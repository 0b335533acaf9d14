"""A real server whose engine or API process is stopped is killed, and its model serves again with the same tokens."""

import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until
from tools.machine import READY_S, VLLM, Machine

from coldstart.system.proc import processes

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
HANG_S = 20
FILE = """
memory = "4GiB"
runtime_template = false
hang_timeout_s = {hang_s}
[models.tiny-llama]
args = {args}
on_miss = "warn"
mode = "fresh"
"""


def _ask(url: str, tokens: int) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "tiny-llama",
        "prompt": "Once",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def _model(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/status", timeout=60) as answer:
        (model,) = json.loads(answer.read())["models"]
        return dict(model)


def _process(api: psutil.Process, part: str) -> psutil.Process:
    return api if part == "api" else max(api.children(recursive=True), key=lambda one: one.memory_info().rss)


def _is_gone(pid: int) -> bool:
    return processes.read_identity(pid) is None


def test_stopped_server_is_replaced(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(FILE.format(hang_s=HANG_S, args=json.dumps([*VLLM, "--enforce-eager"])))
    command = ["host", "--host-file", str(file), "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = machine.start(*command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    url = process.stdout.readline().decode().split()[0]
    try:
        first = _ask(url, 16)
        assert first[0] == 200, first
        text = first[1]["choices"][0]["text"]
        for part in ("engine", "api"):
            api = psutil.Process(_model(url)["pid"])
            answers: list[tuple[int, dict[str, Any]]] = []
            asking = threading.Thread(target=lambda to=answers: to.append(_ask(url, 400)))
            asking.start()
            wait_until(lambda: _model(url)["in_flight"])
            os.kill(_process(api, part).pid, signal.SIGSTOP)
            asking.join(READY_S)
            ((status, document),) = answers
            assert status == 502 and "hung and was killed" in document["error"]["message"], document
            assert "one of its processes was suspended by a signal" in (tmp_path / "log").read_text()
            wait_until(partial(_is_gone, api.pid))
            again = _ask(url, 16)
            assert again[0] == 200 and again[1]["choices"][0]["text"] == text, again
    finally:
        process.terminate()
        assert process.wait(60) == 143, (tmp_path / "log").read_text()
