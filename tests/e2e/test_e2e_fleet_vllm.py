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
    machine.root.mkdir(parents=True, exist_ok=True)
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
        assert (group["mode"], group["fallbacks"]) == ("template-engine", []), group
        assert group["phase"] == "serving"
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


def _groups(machine: Machine) -> list[Any]:
    return list(json.loads(machine.run("fleet", "status", "--format", "json"))["models"][0]["groups"])


def _stream(client: openai.OpenAI, tokens: int) -> Iterator[int]:
    """Yield the tokens of a greedy stream as they arrive."""
    more = {"return_token_ids": True, "ignore_eos": True}
    for chunk in client.completions.create(
        model="tiny-llama", prompt=PROMPTS[0], max_tokens=tokens, temperature=0, stream=True, extra_body=more
    ):
        for choice in chunk.choices:
            yield from choice.token_ids or ()  # type: ignore[attr-defined]


@pytest.mark.nightly  # unit/fleet/live/test_moves.py drains a fleet of fakes
def test_stream_moves_to_another_server_when_its_server_is_drained(machine: Machine) -> None:
    words = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "134217728", "--enforce-eager")
    # Only in fp32 is a prefill equal to the decoding of the same tokens.
    words = (*words, "--dtype", "float32")
    with _fleet(machine) as url, (machine.root / "join.log").open("wb") as log:
        joined = machine.start("fleet", "join", "--memory", "4GiB", stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_S
            while len(json.loads(machine.run("fleet", "status", "--format", "json"))["servers"]) < 2:
                assert time.monotonic() < deadline, (machine.root / "join.log").read_text()
            limits = ("--memory", "3GiB", "--min", "2", "--max", "2", "--on-miss", "warn")
            machine.run("fleet", "deploy", "tiny-llama", *limits, "--", *words)
            while [group["phase"] for group in _groups(machine)] != ["serving", "serving"]:
                assert time.monotonic() < deadline, (machine.root / "fleet.log").read_text()
            machine.run("fleet", "scale", "tiny-llama", "--min", "1", "--max", "2")
            client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=READY_S)
            undisturbed = list(_stream(client, 900))
            first, second = (group["workers"][0]["server"] for group in _groups(machine))
            moving = _stream(client, 900)
            made = [next(moving) for _ in range(20)]
            machine.run("fleet", "drain", first)
            assert made + list(moving) == undisturbed
            status = json.loads(machine.run("fleet", "status", "--format", "json"))
            moved = [status["gateway"][name] for name in ("migrated", "migrated_with_kv", "resumed")]
            assert moved == [1, 1, 0]
            while [group["workers"][0]["server"] for group in _groups(machine)] != [second]:
                assert time.monotonic() < deadline, (machine.root / "fleet.log").read_text()
        finally:
            joined.terminate()
            joined.wait(120)
