"""A server of a fleet that makes no progress is killed and replaced; its requests continue elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from support.engines import home
from support.fake_upstream import FakeServer, wait_until
from support.fleet_rig import SETTINGS, FleetStage, deployment, fleet

__all__ = ["home"]
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
