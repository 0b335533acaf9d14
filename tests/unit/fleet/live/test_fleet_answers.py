"""Requests to a fleet: they wait for a start, and none is lost when a server ends."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_upstream import FakeServer, wait_until
from support.fleet_rig import SETTINGS, FleetStage, deployment, fleet

from coldstart.fleet.events import WorkerEnded
from coldstart.fleet.live.control import MAX_UNSENT_TRIES
from coldstart.host.live.request_router import Ticket
from coldstart.host.live.upstream import DisconnectedError, NothingSentError


async def test_a_server_that_dies_loses_no_request_that_was_not_begun(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a", most=1))
        await stage.ask("a")
        (first,) = stage.rig.servers()
        asked = [asyncio.create_task(stage.ask("a", n, pieces=1, pause_s=1.0)) for n in range(2)]
        await wait_until(lambda: len(first.asked) == 3)
        first.over.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        assert stage.control.readmitted_count >= 2
        assert len(list(stage.rig.servers())) == 2


async def test_unreachable_servers_only_delay_a_request(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a"))
        for node in stage.rig.nodes.values():
            node.away = True
        cold = asyncio.create_task(stage.ask("a"))
        told = stage.rig.recording
        await wait_until(lambda: sum(isinstance(event, WorkerEnded) for _, event, _ in told) > 4)
        assert not cold.done()
        for node in stage.rig.nodes.values():
            node.away = False
        assert (await cold)[0] == 200


@pytest.mark.parametrize(("unsent", "sent"), [(0, 4), (10, 4), (16, 0)])
async def test_only_sent_requests_count_as_the_cause_of_a_dead_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsent: int, sent: int
) -> None:
    monkeypatch.setattr("coldstart.fleet.core.SUSPECT_S", 0.0)
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a"))
        ticket: Ticket | None = stage.control.admit_request("a")
        assert ticket is not None
        replica = await ticket.granted
        gone, broken = NothingSentError("refused"), DisconnectedError("closed")
        for error in [gone] * unsent + [broken] * sent:
            assert ticket is not None
            ticket = await stage.control.readmit_request(ticket, replica, error)
        assert ticket is not None
        last = gone if unsent == MAX_UNSENT_TRIES else broken
        assert await stage.control.readmit_request(ticket, replica, last) is None
        stage.control.end_request(ticket)


async def test_request_fails_with_the_reason_when_the_model_cannot_start(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        for node in stage.rig.nodes.values():
            node.servers.failing["a"] = "no weights at /nowhere"
        stage.deploy(deployment("a"))
        status, body = await stage.ask("a")
        assert status == 503 and "no weights at /nowhere" in body["error"]["message"]
        # It keeps a stream alive meanwhile.
        for node in stage.rig.nodes.values():
            node.servers.failing.clear()
            node.servers.hold = True
        waiting = asyncio.create_task(stage.events("a"))
        await wait_until(lambda: len(list(stage.rig.servers())) > 3)
        await asyncio.sleep(0.2)
        for server in stage.rig.servers():
            server.gate.set()
        lines = await waiting
        assert any(line.startswith(b': {"model": "a", "state": "starting"') for line in lines)
        assert lines[-1] == b"data: [DONE]"


@pytest.mark.parametrize("fault", ["disk", "port"])
async def test_server_that_cannot_start_another_one_loses_no_request(tmp_path: Path, fault: str) -> None:
    """The other server takes the model; the first one continues to serve its models."""
    async with fleet(tmp_path, memory=20) as stage:
        stage.deploy(deployment("a", most=1))
        assert (await stage.ask("a"))[0] == 200
        (at,) = (node for node in stage.rig.nodes.values() if node.servers.begun)
        at.servers.full = fault == "disk"
        at.node.host = {"port": "192.0.2.1"}.get(fault, at.node.host)  # not an address of this machine
        stage.deploy(deployment("b", most=1))
        assert (await stage.ask("b"))[0] == 200
        (b,) = (one for one in stage.control.status()["models"] if one["name"] == "b")
        assert b["groups"][0]["workers"][0]["server"] != at.spec.name
        # The fuller server was tried first.
        assert b["groups"][0]["name"] != "b#1"
        assert (await stage.ask("a"))[0] == 200 and len(at.servers.begun) == 1


async def test_remove_waits_for_running_requests(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a"))
        long = asyncio.create_task(stage.events("a", pieces=20, pause_s=0.02))
        await wait_until(lambda: any(server.asked for server in stage.rig.servers()))
        stage.control.remove("a")
        assert len([one for one in await long if one.startswith(b"data: {")]) == 20
        assert (await stage.ask("a"))[0] == 404
        await wait_until(lambda: all(server.ended.done() for server in stage.rig.servers()))


HANG_S = 1.0
QUICK = replace(SETTINGS, hang_timeout_s=HANG_S)
PIPELINE = replace(QUICK, most_ranks=2)


def _servers(stage: FleetStage) -> list[FakeServer]:
    return list(stage.rig.servers())


async def _metric(stage: FleetStage) -> str:
    async with stage.client.get(stage.rig.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(line for line in lines if line.startswith("coldstart_fleet_servers_hung_total"))


async def test_server_is_replaced_when_its_api_does_not_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, settings=QUICK) as stage:
        stage.deploy(deployment("a"))
        assert (await stage.ask("a", 1))[0] == 200
        (server,) = _servers(stage)
        assert await _metric(stage) == 'coldstart_fleet_servers_hung_total{model="a"} 0.0'
        stream = asyncio.create_task(stage.ask("a", 2, pause_s=60, pieces=1))
        await wait_until(lambda: 2 in server.asked)
        server.hangs = True
        await server.ended
        assert server.was_killed
        assert (await stage.ask("a", 3))[0] == 200
        await wait_until(lambda: len(_servers(stage)) == 2)
        stream.cancel()
        assert await _metric(stage) == 'coldstart_fleet_servers_hung_total{model="a"} 1.0'


async def test_pipeline_is_replaced_when_a_later_rank_is_stopped(tmp_path: Path) -> None:
    async with fleet(tmp_path, memory=8, settings=PIPELINE, network=1.0) as stage:
        stage.deploy(deployment("a", ttft_s=8.0, shares={2: (5, 5)}))
        assert (await stage.ask("a", 1))[0] == 200
        first, second = _servers(stage)
        assert "--headless" in second.launch.args
        second.stopped = True
        await asyncio.gather(first.ended, second.ended)
        assert second.was_killed and not first.was_killed
        assert (await stage.ask("a", 2))[0] == 200
