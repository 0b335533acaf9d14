"""The live control of a fleet with fake servers: it executes the core's decisions and recovers its state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands.fleet import render
from support.fake_upstream import wait_until
from support.fleet_rig import deployment, fleet

from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.events import Action, Event
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.orders import NodeReport
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.lab.fleet import simulate
from coldstart.lab.records import ModelRequest


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


async def test_the_live_control_orders_what_the_simulation_ordered(tmp_path: Path) -> None:
    """A live control that receives the events of a simulated run makes the same decisions and orders them."""
    settings = FleetSettings(consolidate=False)
    servers = [ServerSpec(f"s{n}", 60, 4.0, 20.0) for n in range(3)]
    costs = Costs(2.0, 1.0, 2.0, 0.1, 0.01, 1.0, 0.05)
    models = [
        FleetModel("small", 20, 25, costs, ttft_s=30.0, batch=2, idle_s=15.0),
        FleetModel("large", 40, 50, costs, ttft_s=9.0, tpot_s=0.2, batch=3, idle_s=40.0),
    ]
    requests = [ModelRequest(2.0 * n, models[n % 2].name, 0.5, 0.05, 40) for n in range(40)]
    recording: list[tuple[float, Event, list[Action]]] = []
    faults = [(30.0, events.ServerLost("s1")), (45.0, events.ServerJoined(servers[1]))]
    simulate(requests, servers, models, settings, faults=faults, record=recording)
    assert any(
        isinstance(action, events.LaunchRank) and action.ranks > 1
        for _, _, did in recording
        for action in did
    )
    clock = [0.0]
    again: list[tuple[float, Event, list[Action]]] = []
    control = FleetControl(
        settings, FleetState(None), clock=lambda: clock[0], record=lambda *one: again.append(one)
    )
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
