"""The live control of a fleet with fake servers: it executes the core's decisions and recovers its state."""

import asyncio
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands.fleet import render
from support.fake_upstream import FakeServers, wait_until
from support.fleet_rig import FleetStage, Recording, deployment, fleet, record_decisions

from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import LaunchRank
from coldstart.fleet.live import admin, state
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import NodeReport, RankEnded, RankOrder, RankUp
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.lab.fleet import simulate
from coldstart.lab.records import SimulatedRequest


class Silent:
    """Server that executes orders and reports nothing."""

    place = None

    def __init__(self) -> None:
        self.orders: list[Any] = []

    async def call(self, method: str, *args: Any) -> Any:
        if method == "launch":
            self.orders.append(args[0].rank)
        elif method == "stop":
            self.orders.append(events.StopWorker(*args))
        return ("127.0.0.1", 29500)


async def test_the_live_control_orders_what_the_simulation_ordered() -> None:
    """A live control that receives the events of a simulated run makes the same decisions and orders them."""
    settings = FleetSettings(consolidate=False)
    servers = [ServerSpec(f"s{n}", 60, 4.0, 20.0) for n in range(3)]
    costs = Costs(2.0, 1.0, 2.0, 0.1, 0.01, 1.0, 0.05)
    models = [
        FleetModel("small", 20, 25, costs, ttft_s=30.0, batch=2, idle_s=15.0),
        FleetModel("large", 40, 50, costs, ttft_s=9.0, tpot_s=0.2, batch=3, idle_s=40.0),
    ]
    requests = [SimulatedRequest(2.0 * n, models[n % 2].name, 0.5, 0.05, 40) for n in range(40)]
    recording: Recording = []
    faults = [(30.0, events.ServerLost("s1")), (45.0, events.ServerJoined(servers[1]))]

    def create(*given: Any) -> FleetCore:
        return record_decisions(FleetCore(*given), recording.append)

    simulate(requests, servers, models, settings, faults=faults, core=create)
    assert any(
        isinstance(action, events.LaunchRank) and action.ranks > 1
        for _, _, did in recording
        for action in did
    )
    clock = [0.0]
    again: Recording = []
    control = FleetControl(settings, FleetState(None), clock=lambda: clock[0])
    record_decisions(control.core, again.append)
    nodes = {spec.name: Silent() for spec in servers}
    control.rebuild((spec, nodes[spec.name], NodeReport(0)) for spec in servers)
    for model in models:
        control.deploy(deployment(model.name))
        control.emit(events.ModelDeployed(model))
    again.clear()
    for now, event, _ in recording:
        clock[0] = now
        if isinstance(event, events.ServerLost):
            control.lose_server(event.server)
        elif isinstance(event, events.ServerJoined):
            control.add_server(event.server, nodes[event.server.name])
        else:
            control.emit(event)
        if control._timer is not None:
            control._timer.cancel()
        await asyncio.sleep(0)
    assert again == recording
    for _ in range(5):
        await asyncio.sleep(0)
    launched = [
        order for node in nodes.values() for order in node.orders if isinstance(order, events.LaunchRank)
    ]
    ordered = [action for _, _, did in recording for action in did if isinstance(action, events.LaunchRank)]
    assert sorted(order.worker for order in launched) == sorted(order.worker for order in ordered)


async def test_a_drained_server_goes_empty_and_stays_so(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a"))
        await stage.ask("a")
        control = stage.control
        control.drain("s0")
        await wait_until(next(stage.rig.servers()).ended.done)
        await stage.rig.kill()
        await stage.rig.revive()
        assert (await stage.ask("a"))[0] == 200
        assert not [one for one in stage.rig.nodes["s0"].servers.begun if not one.ended.done()]
        with pytest.raises(UsageError, match="no server"):
            stage.control.drain("s9")


async def test_deploy_with_other_arguments_or_limits(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        control = stage.control
        for order in (control.remove, lambda name: control.scale(name, 0, 1)):
            with pytest.raises(UsageError, match="not deployed"):
                order("a")
        stage.deploy(deployment("a"))
        named = deployment("b")
        with pytest.raises(UsageError, match="refers to two models"):
            control.deploy(replace(named, launch=replace(named.launch, aliases=("a",))))
        control.scale("a", 2, 2)
        await wait_until(lambda: len(stage.rig.groups()) == 2)
        control.deploy(deployment("a", words=("--max-model-len", "64"), most=1))
        await wait_until(lambda: sum(server.ended.done() for server in stage.rig.servers()) == 2)
        await stage.ask("a")
        (server,) = (one for one in stage.rig.servers() if not one.ended.done())
        assert list(server.launch.args)[:2] == ["--max-model-len", "64"]


async def test_a_server_that_cannot_be_used_is_named_with_the_reason_until_it_can(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        control = stage.control
        node = stage.rig.nodes["s0"]
        control.mark_unusable("s0", "/run/long is too long for a unix socket")
        said = stage.control.status()
        assert said["unusable"] == {"s0": "/run/long is too long for a unix socket"}
        assert [one["name"] for one in said["servers"]] == ["s1"]
        assert "server s0 cannot be used: /run/long is too long" in render(said)
        control.add_server(node.spec, node)
        assert (stage.control.status())["unusable"] == {}


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


def _order(
    worker: str = "a#1.0", rank: int = 0, ranks: int = 1, master: tuple[str, int] | None = None
) -> RankOrder:
    launched = LaunchRank(worker, "a#1", "a", rank, ranks, 1, "s", 0, 10, 10, 10, inf)
    return RankOrder(launched, deployment("a", words=("--max-model-len", "64")).launch, 60.0, 120.0, master)


async def test_a_server_comes_up_and_goes(tmp_path: Path) -> None:
    servers = FakeServers(tmp_path)
    node = NodeServers("127.0.0.1", servers)
    await node.launch(_order())
    await node.launch(_order())
    assert [up for _, up in (await node.report()).workers] == [None]
    ((number, up),) = await node.read_events(0)
    assert isinstance(up, RankUp) and up.mode == "fake" and up.url.startswith("http://127.0.0.1:")
    assert len(servers.begun) == 1
    report = await node.report()
    ((found, known),) = report.workers
    assert report.seq == number and known == up and found.ready and not found.stopping
    await node.stop("a#1.0")
    ((_, ended),) = await node.read_events(number)
    assert isinstance(ended, RankEnded) and not ended.hung
    assert await node.read_events((await node.report()).seq, 0.01) == []
    await node.stop("nobody")
    assert (await node.read_events((await node.report()).seq - 1))[0][1] == RankEnded(
        "nobody", "unknown worker"
    )


@pytest.mark.parametrize("words", [(), ("--api-key", "own")])
async def test_each_server_has_key_that_only_its_report_tells(tmp_path: Path, words: tuple[str, ...]) -> None:
    servers = FakeServers(tmp_path)
    node = NodeServers("127.0.0.1", servers)
    keys = set()
    for worker in ("a", "b"):
        order = _order(worker)
        await node.launch(replace(order, launch=deployment("a", words=words).launch))
        ((_, up),) = await node.read_events((await node.report()).seq)
        assert isinstance(up, RankUp) and up.key == servers.begun[-1].env["VLLM_API_KEY"]
        assert up.key not in repr(up)
        keys.add(up.key)
    assert keys == {"own"} if words else len(keys) == 2 and min(map(len, keys)) == 64
    await node.clear()
