"""A fleet of network namespaces whose link is cut during requests and streams.

No request may fail: each request can be retried on the other node, and each stream can continue there.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import psutil
import pytest
from support.fleet_on_ray import PLACES, Asking, Fleet, Streaming, two_node_fleet
from support.processes import has_ended, wait_until
from tools.link_cluster import find_missing, link_cluster

WHY = find_missing() or (None if find_spec("ray") else "no ray")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.skipif(WHY is not None, reason=str(WHY))]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers with one replica each and memory for no more."""
    with (
        link_cluster() as links,
        two_node_fleet(tmp_path_factory.mktemp("cut"), memory="10B", links=links) as made,
    ):
        made.deploy("a", least=2, most=2, batch=40)
        made.wait_until(lambda status: len(_serving(made, status)) == 2)
        yield made


def _serving(fleet: Fleet, status: Any) -> dict[str, str]:
    """Return the server of each serving group."""
    groups = fleet.groups(status, "a")
    return {one["name"]: one["workers"][0]["server"] for one in groups if one["phase"] == "serving"}


def _processes(fleet: Fleet, number: int) -> list[psutil.Process]:
    """Return the model servers of a node by its number; forks of the starter have the same command line."""
    found = []
    for one in psutil.Process(fleet.processes[number].pid).children(recursive=True):
        try:
            words, parent = one.cmdline(), one.parent()
            if "support.fleet_servers" in words and parent is not None and parent.cmdline() == words:
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found


def _asking(fleet: Fleet, stack: ExitStack) -> list[Asking]:
    """Start requests and streams on both servers and wait until all have begun."""
    asking = [stack.enter_context(Asking(fleet, "a", pause_s=0.3)) for _ in range(4)]
    streaming = stack.enter_context(Streaming(fleet, "a", 12, 400))
    wait_until(streaming.is_streaming)
    return asking


def test_short_cut_loses_no_request_and_no_server(fleet: Fleet) -> None:
    assert fleet.links is not None
    before, again = _serving(fleet, fleet.status()), fleet.status()["gateway"]["readmitted"]
    processes = [_processes(fleet, number) for number in (1, 2)]
    with ExitStack() as stack:
        asking = _asking(fleet, stack)
        fleet.links.cut(cut := fleet.busiest("a"))
        fleet.wait_until(lambda status: status["gateway"]["readmitted"] > again)
        fleet.links.reconnect(cut)
    assert not any(one.failed for one in asking)
    assert _serving(fleet, fleet.status()) == before
    assert [_processes(fleet, number) for number in (1, 2)] == processes


def test_node_behind_a_cut_link_returns_without_its_old_servers(fleet: Fleet) -> None:
    assert fleet.links is not None
    before = _serving(fleet, fleet.status())
    with ExitStack() as stack:
        asking = _asking(fleet, stack)
        cut = fleet.busiest("a")
        (old,) = _processes(fleet, PLACES.index(cut) + 1)
        fleet.links.cut(cut)
        ((left,), _) = fleet.wait_until(lambda status: len(status["servers"]) == 1 and status["servers"])
        fleet.wait_until(lambda status: list(_serving(fleet, status).values()) == [left["name"]])
        asked = [len(one.answers) for one in asking]
        wait_until(lambda: all(len(one.answers) > n for one, n in zip(asking, asked, strict=True)))
    assert not any(one.failed for one in asking)
    # The old server still runs unknown to the fleet; it must end when the node returns.
    fleet.links.reconnect(cut)
    now, _ = fleet.wait_until(lambda status: len(found := _serving(fleet, status)) == 2 and found, 180)
    assert len(set(now.values())) == 2 and len(set(now.values()) & set(before.values())) == 1
    assert has_ended(old.pid)
    assert [len(_processes(fleet, number)) for number in (1, 2)] == [1, 1]
    assert {fleet.ask("a")["model"] for _ in range(4)} == {"a"}
