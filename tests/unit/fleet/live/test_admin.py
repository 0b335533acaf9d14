"""Admin requests to a fleet's gateway: they need the admin key, independent of the client key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fleet_rig import FleetStage, deployment, fleet

from coldstart.fleet.live import admin, state


async def _asked(stage: FleetStage, path: str, body: Any = None, key: str = "admin") -> tuple[int, Any]:
    headers = {admin.ADMIN_KEY_HEADER: key}
    verb = "GET" if body is None else "POST"
    async with stage.client.request(verb, stage.rig.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"deploy"',
        b"nothing",
        b"\xff",
        b"[" * 100_000,
        b'{"method": "tell"}',
        b'{"method": "scale", "model": "a"}',
        b'{"method": "scale", "model": "a", "least": "1", "most": 2}',
        b'{"method": "remove", "model": "a", "more": 1}',
        b'{"method": "deploy", "deployment": {}}',
        json.dumps({"method": "deploy", "deployment": state.encode(deployment("a"))})
        .replace('"auto"', '"strange"')
        .encode(),
    ],
)
async def test_malformed_order_is_refused_with_a_reason(tmp_path: Path, body: bytes) -> None:
    async with fleet(tmp_path, keys=("client", "admin")) as stage:
        headers = {admin.ADMIN_KEY_HEADER: "admin", "Content-Type": "application/json"}
        url = stage.rig.url + "/fleet/order"
        async with stage.client.post(url, data=body, headers=headers) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["message"]


async def test_admin_key_and_client_key_open_their_routes_only(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=("client", "admin")) as stage:
        assert (await stage.ask("a"))[0] == 401
        for wrong in ("", "client"):
            assert (await _asked(stage, "/fleet/status", key=wrong))[0] == 401
            assert (await _asked(stage, "/fleet/order", {}, key=wrong))[0] == 401
        assert (await _asked(stage, "/fleet/status"))[0] == 200
        stage.client.headers["Authorization"] = "Bearer client"
        assert (await stage.ask("a"))[0] == 404


async def test_orders_are_executed_or_refused_with_a_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=("client", "admin")) as stage:
        # JSON of a client has no infinity; the command line's has.
        made = deployment("a", ttft_s=5.0, tpot_s=5.0)
        order = {"method": "deploy", "deployment": state.encode(made)}
        assert await _asked(stage, "/fleet/order", order) == (200, {})
        status, said = await _asked(stage, "/fleet/status")
        assert status == 200 and [model["name"] for model in said["models"]] == ["a"]
        assert len(said["servers"]) == 2 and said["gateway"]["starts"] == 0
        scaled = {"method": "scale", "model": "a", "least": 1, "most": 3}
        assert await _asked(stage, "/fleet/order", scaled) == (200, {})
        assert await _asked(stage, "/fleet/order", {"method": "drain", "server": "s1"}) == (200, {})
        said = (await _asked(stage, "/fleet/status"))[1]
        assert said["models"][0]["most"] == 3 and [one["draining"] for one in said["servers"]] == [
            False,
            True,
        ]
        refused = await _asked(stage, "/fleet/order", {"method": "remove", "model": "b"})
        assert refused[0] == 400 and "not deployed" in refused[1]["error"]["message"]
        assert await _asked(stage, "/fleet/order", {"method": "remove", "model": "a"}) == (200, {})
        assert (await _asked(stage, "/fleet/status"))[1]["models"] == []
        assert await _asked(stage, "/fleet/down", {}) == (200, {})
