"""coldstart up prepares and serves a model, a second one finds it, and coldstart down leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support import process_memory
from support.families import find_family, remaining
from tools.machine import PROMPTS, READY_S, VLLM, Machine

from coldstart.launch.completions import CompletionClient
from coldstart.system.ipc.addresses import free_port
from coldstart.validate.launch import HOST

pytestmark = pytest.mark.vllm


@pytest.fixture
def up(machine: Machine, bundle: Any) -> Iterator[dict[str, Any]]:
    """Bring tiny-llama up in the background."""
    port = str(free_port())
    words = ("up", "tiny-llama", "--detach", "--port", port, "--format", "json")
    yield json.loads(machine.run(*words, "--", *VLLM))
    machine.run("down")


PLANTED = {
    name: f"PLANTED-{name}"
    for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "CLIENT_PASSWORD")
}
SECRETS = ("--api-key", "PLANTED-api-key", "--hf-token", "PLANTED-hf-token", "--default-chat-template-kwargs")
SECRET_ARGUMENTS = (
    *SECRETS,
    '{"auth_token": "PLANTED-member"}',
    "--allowed-origins",
    '["http://u:PLANTED-url@h"]',
)


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
    assert "with other settings" not in machine.error()
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


# tests/attacks/test_secrets_in_templates.py shows the same of a template that was started before.
@pytest.mark.parametrize("prepared", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_template_s_memory_holds_no_secret_of_a_start(
    machine: Machine, bundle: Any, prepared: bool
) -> None:
    machine = replace(machine, extra=PLANTED)
    after = ("--", *VLLM, *SECRET_ARGUMENTS)
    if prepared:
        machine.run("template", "start", "tiny-llama", *after)
        (template,) = shown(machine, "template", "status")["templates"]
        assert process_memory.find(template["pid"], b"PLANTED-") == []
    up = json.loads(machine.run("up", "tiny-llama", "--detach", "--port", "0", "--format", "json", *after))
    try:
        (template,) = shown(machine, "template", "status")["templates"]
        assert template["level"] == "engine" and template["servers"] == [up["pid"]]
        assert process_memory.find(template["pid"], b"PLANTED-") == []
        assert process_memory.find(up["pid"], b"PLANTED-api-key")
        headers = {"Authorization": "Bearer PLANTED-api-key"}
        request = urllib.request.Request(f"{up['url']}/v1/models", headers=headers)
        assert urllib.request.urlopen(request, timeout=READY_S).status == 200
        machine.run("up", "tiny-llama", "--detach", *after)
        machine.run("up", "tiny-llama", "--detach", *after, "--api-key", "other", code=1)
        assert "with other settings: API key" in machine.error()
    finally:
        machine.run("down")
        machine.run("template", "stop")


@pytest.mark.nightly
def test_ctrl_c_ends_the_server_and_retains_the_template(machine: Machine, bundle: Any) -> None:
    words = ("up", "tiny-llama", "--port", str(free_port()), "--", *VLLM)
    process = machine.start(*words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and b"template-engine, ready in" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(READY_S) == 130
    assert shown(machine, "down", "--keep-template")["templates"] == []
    (template,) = shown(machine, "template", "status")["templates"]
    assert template["ready"] and template["servers"] == []
    stopped = shown(machine, "down")
    assert stopped["servers"] == [] and [one["pid"] for one in stopped["templates"]] == [template["pid"]]
