"""A real model in a fleet on a real Ray cluster returns the tokens of a stock server to OpenAI's client."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import openai
import psutil
import pytest
from support.processes import has_ended, wait_until
from tools.bursts import complete, open_client, replay
from tools.machine import PROMPTS, READY_S, VLLM, Machine, Tokens

# ray is not imported: it changes the environment, on which templates depend.
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]


UP = ("fleet", "up", "--memory", "4GiB", "--state", "fleet.json")


def _status(machine: Machine) -> dict[str, Any]:
    return dict(json.loads(machine.run("fleet", "status", "--format", "json")))


def _groups(machine: Machine) -> list[Any]:
    return list(_status(machine)["models"][0]["groups"])


def test_model_starts_on_demand_and_stops(machine: Machine, engine_template: None, reference: Tokens) -> None:
    with machine.gateway(*UP) as (_, url, _):
        assert _status(machine)["servers"]
        machine.run("fleet", "deploy", "tiny-llama", "--idle", "10", "--", *VLLM)
        client = open_client(url)
        assert list(client.models.list())
        assert [complete(client, "tiny-llama", prompt) for prompt in PROMPTS] == reference
        (group,) = _groups(machine)
        assert (group["mode"], group["fallbacks"]) == ("template-engine", []), group
        assert group["phase"] == "serving"
        replay(machine, url, "--model", "tiny-llama")
        descendants = set(psutil.Process().children(recursive=True))
        fleet = [
            one
            for one in psutil.process_iter(["cmdline"])
            if one in descendants and any("fleet" in word for word in one.info["cmdline"] or ())
        ]
        assert fleet
        wait_until(lambda: not _groups(machine), 120)
    assert all(has_ended(one.pid) for one in fleet)


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
    # In bf16 the tokens would change if the new server computed the KV of several tokens again.
    words = (*words, "--dtype", "bfloat16")
    with machine.gateway(*UP) as (_, url, _), (machine.root / "join.log").open("wb") as log:
        joined = machine.start("fleet", "join", "--memory", "4GiB", stdout=log, stderr=log)
        try:
            wait_until(lambda: len(_status(machine)["servers"]) == 2, READY_S)
            limits = ("--memory", "3GiB", "--min", "2", "--max", "2", "--on-miss", "warn")
            machine.run("fleet", "deploy", "tiny-llama", *limits, "--", *words)
            wait_until(lambda: [one["phase"] for one in _groups(machine)] == ["serving"] * 2, READY_S)
            machine.run("fleet", "scale", "tiny-llama", "--min", "1", "--max", "2")
            client = open_client(url)
            undisturbed = list(_stream(client, 900))
            first, second = (group["workers"][0]["server"] for group in _groups(machine))
            moving = _stream(client, 900)
            made = [next(moving) for _ in range(20)]
            machine.run("fleet", "drain", first)
            assert made + list(moving) == undisturbed
            gateway = _status(machine)["gateway"]
            assert [gateway[name] for name in ("migrated", "migrated_with_kv", "resumed")] == [1, 1, 0]
            wait_until(lambda: [one["workers"][0]["server"] for one in _groups(machine)] == [second], READY_S)
        finally:
            joined.terminate()
            joined.wait(120)
