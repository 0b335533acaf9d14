"""Routes of the gateway: models, health, metrics, status, keys and unload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fake_upstream import TWO, Stage, run, staged, wait_until

from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.access_control import PASSED


async def _get(stage: Stage, path: str, **headers: str) -> tuple[int, Any]:
    async with stage.client.get(stage.url + path, headers=headers) as answer:
        text = await answer.text()
        return answer.status, await answer.json() if answer.content_type == "application/json" else text


def test_every_name_is_a_model_whether_it_serves_or_not(tmp_path: Path) -> None:
    models = {**TWO, "b": {**TWO["b"], "args": ["--lora-modules", '{"name": "tuned", "path": "/t"}']}}

    async def work() -> None:
        async with staged(tmp_path, models) as stage:
            status, said = await _get(stage, "/v1/models")
            assert status == 200 and said["object"] == "list"
            cards = {card["id"]: card for card in said["data"]}
            assert list(cards) == ["a", "alpha", "b", "tuned"]
            assert (cards["alpha"]["root"], cards["tuned"]["parent"], cards["a"]["parent"]) == (
                "a",
                "b",
                None,
            )
            assert (await _get(stage, "/v1/models/tuned"))[1]["root"] == "b"
            status, said = await _get(stage, "/v1/models/nobody")
            assert status == 404 and said["error"]["type"] == "NotFoundError"
            assert not stage.servers.begun

    run(work())


def test_health_metrics_and_status(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            await stage.ask(model="a", prompt=1)
            assert (await _get(stage, "/health"))[0] == 200
            text = (await _get(stage, "/metrics"))[1]
            assert 'coldstart_host_answers_total{code="200",model="a"} 1.0' in text
            assert 'coldstart_host_model_state{model="a",state="ready"} 1.0' in text
            assert 'coldstart_host_start_seconds_count{mode="fake",model="a"} 1.0' in text
            said = (await _get(stage, "/status"))[1]
            assert [model["state"] for model in said["models"]] == ["ready", "stopped"]

    run(work())


def test_unknown_paths_are_not_forwarded(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path) as stage:
            for path in ("/sleep", "/v1/load_lora_adapter", "/nowhere"):
                status, _, body = await stage.ask(path=path, model="a")
                assert status == 404 and body["error"]["code"] == 404
            status, said = await _get(stage, "/v1/completions")
            assert status == 405 and "takes POST" in said["error"]["message"]
            assert said["error"]["type"] == "invalid_request_error"
            status, said = await _get(stage, "/")
            assert status == 200 and "<html" in said
            assert not stage.servers.begun
            for path in PASSED:
                assert (await stage.ask(path=path, model="a", prompt=1))[0] == 200

    run(work())


def test_every_route_but_health_needs_the_key(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, gateway={"endpoint": GatewayEndpoint(api_key="k3y")}) as stage:
            status, _, body = await stage.ask(model="a", prompt=1)
            assert status == 401 and body["error"]["type"] == "AuthenticationError"
            assert (await _get(stage, "/status"))[0] == 401
            assert (await _get(stage, "/health"))[0] == 200
            assert (await _get(stage, "/status", Authorization="Bearer k3y"))[0] == 200
            assert not stage.servers.begun

    run(work())


def test_a_model_is_unloaded_by_hand_and_comes_back_when_asked(tmp_path: Path) -> None:
    models = {**TWO, "b": {**TWO["b"], "pinned": True}}

    async def work() -> None:
        async with staged(tmp_path, models, memory=20) as stage:
            for name in "ab":
                await stage.ask(model=name, prompt=1)
            running = (await _get(stage, "/running"))[1]["running"]
            assert [(one["model"], one["state"]) for one in running] == [("a", "ready"), ("b", "ready")]
            assert (await _get(stage, "/logs/a")) == (200, "a said so\n")
            async with stage.client.post(stage.url + "/unload", json={}) as answer:
                assert await answer.json() == {"unloading": ["a"]}
            await wait_until(lambda: "a" not in stage.driver.lifecycle.residences)
            assert (await _get(stage, "/logs/a"))[0] == 404
            assert [one["model"] for one in (await _get(stage, "/running"))[1]["running"]] == ["b"]
            assert (await stage.ask(model="a", prompt=1))[0] == 200
            async with stage.client.post(stage.url + "/unload/nobody", json={}) as answer:
                assert answer.status == 404
            async with stage.client.post(stage.url + "/unload/a", json={}) as answer:
                assert await answer.json() == {"unloading": ["a"]}
            assert (await _get(stage, "/unload"))[0] == 405

    run(work())


def test_an_unlisted_model_is_served_and_not_named(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, {**TWO, "b": {**TWO["b"], "unlisted": True}}) as stage:
            said = (await _get(stage, "/v1/models"))[1]
            assert [card["id"] for card in said["data"]] == ["a", "alpha"]
            assert (await stage.ask(model="b", prompt=1))[0] == 200

    run(work())


def test_both_forms_of_a_key_are_accepted(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, gateway={"endpoint": GatewayEndpoint(api_key="k")}) as stage:
            assert (await _get(stage, "/status", **{"Authorization": "Bearer k"}))[0] == 200
            assert (await _get(stage, "/status", **{"x-api-key": "k"}))[0] == 200
            for wrong in ({"x-api-key": "j"}, {"Authorization": "Bearer "}, {}):
                assert (await _get(stage, "/status", **wrong))[0] == 401

    run(work())
