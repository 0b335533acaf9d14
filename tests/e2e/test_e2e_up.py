"""coldstart up prepares and serves a model, a second one finds it, and coldstart down leaves nothing behind."""

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.families import find_family, remaining
from tools.machine import PROMPTS, READY_S, VLLM, Machine

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
