"""One request through the gateway: queued in order, streamed in pieces, and canceled with its client."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import FakeServer, Stage, staged, wait_until

JSON = {"Content-Type": "application/json"}


def _data(lines: list[bytes]) -> list[Any]:
    found = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    return [json.loads(one) if one != b"[DONE]" else "[DONE]" for one in found]


async def test_request_and_answer_pass_unchanged_with_timings(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for expected in ("cold", "warm"):
            status, headers, body = await stage.ask(model="a", prompt=expected, pieces=2)
            assert (status, body) == (200, {"model": "a", "text": [expected, expected]})
            assert headers["x-own"] == "1" and headers["x-coldstart-mode"] == "fake"
            timing = headers["server-timing"]
            assert ("start;dur=" in timing) == (expected == "cold")
            assert "queued;dur=" in timing and "first-token;dur=" in timing
        assert len(stage.servers.begun) == 1
        assert stage.idle()


async def test_200_requests_to_a_cold_model_are_one_start_and_keep_their_order(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True) as stage:
        asked = []
        for number in range(200):
            asked.append(asyncio.create_task(stage.ask(model="a", prompt=number)))
            await wait_until(lambda number=number: len(stage.driver._tickets) > number)
        stage.servers.last("a").gate.set()
        answers = await asyncio.gather(*asked)
        assert [one for one in answers if one[0] != 200] == []
        assert [body["text"][0] for _, _, body in answers] == list(range(200))
        assert stage.servers.last("a").asked == list(range(200))
        assert len(stage.servers.begun) == 1


async def test_error_after_a_heartbeat_is_an_event_of_the_stream(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True, gateway={"heartbeat_s": 0.01}) as stage:
        stage.servers.failing["a"] = "no such weights"
        async with stage.post(path="/v1/messages", model="a", prompt="x", stream=True) as answer:
            assert (await answer.content.readline()).startswith(b": {")
            stage.servers.last("a").gate.set()
            (said,) = _data(lines := [line async for line in answer.content])
        assert b"event: error\n" in lines
        assert said["error"]["code"] == 503 and "no such weights" in said["error"]["message"]
        async with stage.post(model="b", prompt="x", stream=True, status=422) as answer:
            assert (await answer.content.readline()).startswith(b": {")
            stage.servers.last("b").gate.set()
            (said,) = _data([line async for line in answer.content])
        assert said == {"error": {"message": "no"}}


@pytest.mark.parametrize("stream", [True, False])
async def test_server_request_ends_when_the_client_disconnects(tmp_path: Path, stream: bool) -> None:
    async with staged(tmp_path) as stage:
        asked = asyncio.create_task(
            stage.ask(model="a", prompt="x", stream=stream, pieces=10_000, pause_s=0.01)
        )
        await wait_until(lambda: stage.servers.begun and stage.servers.last("a").asked)
        asked.cancel()
        await wait_until(lambda: stage.servers.last("a").gone == ["x"])
        await wait_until(stage.idle)


@pytest.mark.parametrize(
    ("aborts", "expected", "text"),
    [(1, 200, "'finish_reason': 'length'"), (2, 502, "the server of a disconnected")],
)
async def test_request_that_a_server_aborts_at_its_end_is_sent_once_more(
    tmp_path: Path, aborts: int, expected: int, text: str
) -> None:
    async with staged(tmp_path) as stage:
        stage.servers.aborts = aborts
        status, _, body = await stage.ask(model="a", prompt="x", max_tokens=3)
        first, second = stage.servers.begun
        assert status == expected and text in str(body) and first.bodies == second.bodies


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "BadRequestError"),
        (b"[]", 400, "BadRequestError"),
        (b'{"model": 5}', 400, "BadRequestError"),
        (b'{"model": "nobody"}', 404, "NotFoundError"),
        ('\ufeff{"model": "nobody"}'.encode(), 404, "NotFoundError"),
        ('{"model": "nobody"}'.encode("utf-16"), 404, "NotFoundError"),
        (b"{}", 404, "NotFoundError"),
        (b"[" * 100_000, 400, "BadRequestError"),
    ],
)
async def test_unroutable_request_gets_an_error(tmp_path: Path, body: bytes, status: int, kind: str) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.client.post(stage.url + "/v1/completions", data=body, headers=JSON) as answer,
    ):
        said = (await answer.json())["error"]
        assert (answer.status, said["type"], said["code"], said["param"]) == (status, kind, status, None)
        assert answer.headers["x-request-id"] and not stage.servers.begun


async def _one(stage: Stage, number: int, chance: random.Random) -> str:
    """Read a stream and check that all pieces belong to it; half of the clients disconnect midway."""
    model, last = chance.choice("ab"), chance.randrange(20) if chance.random() < 0.5 else None
    prompt, seen = f"{model}-{number}", 0
    async with stage.post(model=model, prompt=prompt, stream=True, pieces=20, pause_s=0.001) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            assert json.loads(line.removeprefix(b"data: ")) == {"prompt": prompt, "number": seen}
            seen += 1
            if last is not None and seen > last:
                return "left"
    assert seen == 20
    return "whole"


@pytest.mark.slow
async def test_streams_with_random_disconnects_do_not_mix_and_leave_nothing(tmp_path: Path) -> None:
    chance = random.Random(11)
    async with staged(tmp_path, memory=20, max_held=1000) as stage:
        ended = await asyncio.gather(*(_one(stage, number, chance) for number in range(400)))
        assert {"left", "whole"} == set(ended)
        await wait_until(stage.idle)
        assert not [task for task in asyncio.all_tasks() if "watch" in repr(task.get_coro())]
        assert stage.driver.facts.get_model("a").requests + stage.driver.facts.get_model("b").requests == 400
        connections = [replica.upstream for replica in stage.driver.lifecycle.replicas.values()]
        # An aborted connection ends at the next turn of the loop.
        await wait_until(lambda: not any(one.responses for one in connections))


HANG_S = 1.0


async def _hung(stage: Stage, server: FakeServer) -> str:
    """Wait until the host has killed the server, and return the reason in the model's status."""
    await server.ended
    await wait_until(lambda: stage.model("a")["state"] == "failed")
    return str(stage.model("a")["error"])


async def test_server_is_killed_when_its_api_does_not_answer(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        await stage.ask(model="a", prompt=1)
        server = stage.servers.last("a")
        lines = asyncio.create_task(stage.events(model="a", prompt=2, pause_s=60))
        await wait_until(lambda: len(server.asked) == 2)
        server.hangs = True
        assert "the API server did not respond for 1 s" in await _hung(stage, server)
        assert b"the server of a hung and was killed" in (await lines)[-1]
        # The cause was not the model: it starts again at once.
        assert stage.model("a")["failures"] == 0
        assert (await stage.ask(model="a", prompt=3))[0] == 200


async def test_server_is_killed_when_a_process_of_it_is_stopped(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        asked = asyncio.create_task(stage.ask(model="a", prompt=1, pieces=1, pause_s=60))
        await stage.servers.begins(1)
        stage.servers.last("a").stopped = True
        status, _, document = await asked
        assert status == 502 and "hung and was killed" in document["error"]["message"]
        assert "suspended by a signal for 1 s" in stage.model("a")["error"]


async def test_server_is_not_killed_when_a_request_waits_for_it(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        assert (await stage.ask(model="a", prompt=1, pieces=1, pause_s=2.5 * HANG_S))[0] == 200
        assert not stage.servers.last("a").was_killed and len(stage.servers.begun) == 1
