"""Servers forked from a warm template have separate ports, lifetimes and correct tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tools.machine import VLLM, Machine, Tokens

pytestmark = pytest.mark.vllm


@pytest.fixture
def runtime_template(machine: Machine, bundle: Any) -> Iterator[None]:
    machine.run("template", "start", "tiny-llama", "--level", "runtime", "--", *VLLM)
    yield
    machine.run("template", "stop", "--level", "runtime", "--force")


@pytest.mark.nightly  # test_e2e_many.py starts a server from the runtime template of a host
def test_a_runtime_template(machine: Machine, runtime_template: None, reference: Tokens) -> None:
    with machine.serving("tiny-llama", "--mode", "template-runtime") as served:
        assert served.report["mode"] == "template-runtime" and served.report["fallbacks"] == []
        assert served.report["fast_path"] == {"mode": True, "compile": True}
        assert served.tokens() == reference


def test_two_servers_of_one_engine_template(
    machine: Machine, engine_template: None, reference: Tokens
) -> None:
    # auto takes the template, too.
    with (
        machine.serving("tiny-llama", "--mode", "template-engine") as one,
        machine.serving("tiny-llama", "--mode", "auto") as two,
    ):
        assert [one.report["mode"], two.report["mode"]] == ["template-engine"] * 2
        assert one.report["fallbacks"] == two.report["fallbacks"] == []
        assert one.report["pid"] != two.report["pid"] and one.report["url"] != two.report["url"]
        assert one.tokens() == two.tokens() == reference
        shown = json.loads(machine.run("template", "status", "--format", "json"))
        assert [len(template["servers"]) for template in shown["templates"]] == [2]
        machine.run("template", "stop", code=1)
        assert "2 server(s) forked from this template still run" in machine.error()
        assert two.tokens() == reference


def test_a_second_template_for_the_same_key_is_refused(machine: Machine, engine_template: None) -> None:
    machine.run("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM, code=2)
    assert "for tiny-llama already runs" in machine.error()
