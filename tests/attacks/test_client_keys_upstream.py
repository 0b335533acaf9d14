"""A model's server, and an observer on the way to it, receive none of a client's keys and cookies."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_upstream import TWO, staged

from coldstart.host.endpoint import GatewayEndpoint

SECRETS = {
    "Authorization": "Bearer clients-key",
    "X-Api-Key": "clients-key",
    "Cookie": "session=clients-key",
    "Proxy-Authorization": "Basic clients-key",
    "X-Coldstart-Admin-Key": "clients-key",
}


@pytest.mark.parametrize("args", [[], ["--api-key", "servers-key"]])
async def test_server_receives_its_own_key_alone(tmp_path: Path, args: list[str]) -> None:
    models = {**TWO, "a": {**TWO["a"], "args": args}}
    gateway = {"endpoint": GatewayEndpoint(api_key="clients-key")}
    async with staged(tmp_path, models, gateway=gateway) as stage:
        body = {"model": "a", "prompt": "x"}
        url = stage.url + "/v1/completions"
        async with stage.client.post(url, json=body, headers=SECRETS) as answer:
            assert answer.status == 200
        (received,) = stage.servers.last("a").headers
        assert "clients-key" not in str(received) and "cookie" not in received
        assert received.get("authorization") == (f"Bearer {args[1]}" if args else None)
