"""A fleet on a real Ray cluster of three nodes on this machine, while processes are killed.

Gateway, Ray, actors and starter are real. The model servers need no model: the tests cover starts, routing, loss and recovery.
"""

import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fleet_on_ray import TESTS, Asking, Fleet, two_node_fleet
from support.processes import has_ended, wait_until

from coldstart.fleet.live.ray_process import run_own_ray
from coldstart.fleet.specification import ServerSpec
from coldstart.system.paths import Cache

# ray is not imported: it changes the environment, on which templates depend.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers and a head without a server."""
    with two_node_fleet(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.mark.nightly  # unit/fleet/live/test_moves.py restarts a fleet with fakes
def test_servers_of_cluster_survive_fleets_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with run_own_ray(ServerSpec("here", 40, 1e9, 1e9), Cache.at(tmp_path / "cache")) as ray:
        first = Fleet(tmp_path, ray=ray.address, env=ray.env)
        first.deploy("a")
        server = psutil.Process(first.ask("a")["pid"])
        assert server.nice() == psutil.Process().nice()
        groups = first.groups(first.status(), "a")
        with pytest.raises(ValueError):  # it ends without an address
            Fleet(tmp_path, ray=ray.address, env=ray.env)
        assert "already has a gateway: process" in (tmp_path / "up.log").read_text()
        first.processes[0].kill()
        first.end()
        began = time.monotonic()
        second = Fleet(tmp_path, ray=ray.address, env=ray.env)
        assert time.monotonic() - began < 30
        assert second.ask("a")["pid"] == server.pid
        assert [one["name"] for one in second.groups(second.status(), "a")] == [one["name"] for one in groups]
        # The new process decides: the next model starts.
        second.deploy("b")
        assert second.ask("b")["model"] == "b"
        second.request("/fleet/down", {})
        second.end()
        wait_until(lambda: has_ended(server.pid))


def test_killed_server_loses_no_request_that_has_not_begun(fleet: Fleet) -> None:
    fleet.deploy("c")
    first = fleet.ask("c")["pid"]
    with Asking(fleet, "c", pause_s=0.05) as asking:
        wait_until(lambda: len(asking.answers) > 5)
        os.kill(first, signal.SIGKILL)
        answered = len(asking.answers)
        wait_until(lambda: len(asking.answers) > answered + 10)
    assert not asking.failed and len({answer["pid"] for answer in asking.answers}) == 2
    assert fleet.status()["gateway"]["readmitted"] >= 1


def test_killed_actor_ends_its_servers_and_restarts(fleet: Fleet) -> None:
    fleet.deploy("d")
    first = psutil.Process(fleet.ask("d")["pid"])
    actor = next(one for one in first.parents() if "ServerActor" in one.cmdline()[0])
    with Asking(fleet, "d", pause_s=0.05) as asking:
        wait_until(lambda: len(asking.answers) > 5)
        actor.kill()
        wait_until(lambda: has_ended(first.pid))
        answered = len(asking.answers)
        wait_until(lambda: len(asking.answers) > answered + 10)
    assert not asking.failed
    assert len({answer["pid"] for answer in asking.answers}) == 2
    fleet.wait_until(lambda status: len(status["servers"]) == 2)


@pytest.mark.nightly
def test_dead_node_is_removed_with_its_servers(fleet: Fleet) -> None:
    def third(status: Any) -> set[str]:
        return {one["name"] for one in status["servers"]} - two

    two = {one["name"] for one in fleet.status()["servers"]}
    extra = fleet.join("three")
    first, _ = fleet.wait_until(third, 180)
    # Ray ends a node together with its raylet; the join command starts another one.
    next(one for one in psutil.Process(extra.pid).children(recursive=True) if one.name() == "raylet").kill()
    (name,), _ = fleet.wait_until(lambda status: third(status) - first, 180)
    for child in psutil.Process(extra.pid).children(recursive=True):
        child.kill()
    extra.kill()
    _, seconds = fleet.wait_until(lambda status: name not in [one["name"] for one in status["servers"]])
    assert seconds < 20


def test_down_leaves_no_process(fleet: Fleet) -> None:
    pids = [fleet.ask(model)["pid"] for model in ("c", "d")]
    fleet.request("/fleet/down", {})
    fleet.processes[0].wait(60)
    wait_until(lambda: all(map(has_ended, pids)))


@pytest.mark.nightly
def test_fleet_serves_warm_models_and_reports_the_reason_when_ray_ends(tmp_path: Path) -> None:
    made = Fleet(tmp_path)
    try:
        made.join("one")
        made.wait_until(lambda status: status["servers"], 180)
        made.deploy("a")
        server = made.ask("a")["pid"]
        up = psutil.Process(made.processes[0].pid)
        (control,) = [child for child in up.children(recursive=True) if child.name() == "gcs_server"]
        control.kill()
        log = tmp_path / "up.log"
        wait_until(lambda: '"event": "ray ended"' in log.read_text())
        assert made.ask("a")["pid"] == server
        up.terminate()
        assert made.processes[0].wait(60) == 1 and "the fleet's Ray cluster stopped: " in log.read_text()
    finally:
        made.end()
