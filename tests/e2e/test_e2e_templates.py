"""Servers forked from a warm template have separate ports, lifetimes and correct tokens."""

import json

import pytest
from tools.machine import Machine, Tokens

pytestmark = pytest.mark.vllm


def test_two_servers_of_the_template(machine: Machine, engine_template: None, reference: Tokens) -> None:
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
        assert "cannot stop the template" in machine.error()
        assert two.tokens() == reference
