"""A real model in a fleet on a real Ray cluster returns the tokens of a stock server to OpenAI's client."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import openai
import psutil
import pytest
from support.processes import has_ended
from tools.bursts import check_replay
from tools.machine import PROMPTS, READY_S, VLLM, Machine, Tokens

# ray is not imported: it changes the environment, on which templates depend.
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]


@contextmanager
def _fleet(machine: Machine) -> Iterator[str]:
    with (machine.root / "fleet.log").open("wb") as log:
        words = ("fleet", "up", "--memory", "4GiB", "--port", "0", "--state", "fleet.json")
        process = machine.start(*words, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line, (machine.root / "fleet.log").read_text()
        yield line.split()[0]
    finally:
        process.terminate()
        process.wait(120)


def _deploy(machine: Machine) -> None:
    assert json.loads(machine.run("fleet", "status", "--format", "json"))["servers"]
    machine.run("fleet", "deploy", "tiny-llama", "--idle", "10", "--", *VLLM)


def test_model_starts_on_demand_and_stops(machine: Machine, engine_template: None, reference: Tokens) -> None:
    with _fleet(machine) as url:
        _deploy(machine)
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=READY_S)
        assert list(client.models.list())
        more = {"return_token_ids": True}
        made: list[Any] = [
            client.completions.create(
                model="tiny-llama", prompt=prompt, max_tokens=16, temperature=0, extra_body=more
            )
            for prompt in PROMPTS
        ]
        assert [tuple(one.choices[0].token_ids) for one in made] == reference
        (group,) = json.loads(machine.run("fleet", "status", "--format", "json"))["models"][0]["groups"]
        assert (group["mode"], group["fallbacks"]) == ("template-engine", []) and group["phase"] == "serving"
        check_replay(machine, url, "--model", "tiny-llama")
        descendants = set(psutil.Process().children(recursive=True))
        fleet = [
            one
            for one in psutil.process_iter(["cmdline"])
            if one in descendants and any("fleet" in word for word in one.info["cmdline"] or ())
        ]
        assert fleet
        deadline = time.monotonic() + 120
        while json.loads(machine.run("fleet", "status", "--format", "json"))["models"][0]["groups"]:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    assert all(has_ended(one.pid) for one in fleet)
