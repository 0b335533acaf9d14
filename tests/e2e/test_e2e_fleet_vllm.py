"""A real model in a fleet on a real Ray cluster returns the tokens of a stock server to OpenAI's client.

unit/fleet/live/test_moves.py drains a server of a fleet, and test_e2e_kv_handover.py moves a stream of a real server.
"""

import json
from importlib.util import find_spec
from typing import Any

import psutil
import pytest
from support.processes import has_ended, wait_until
from tools.bursts import complete, open_client, replay
from tools.machine import PROMPTS, VLLM, Machine, Tokens

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
