"""A second user of the machine attacks a running fleet: its gateway, Ray's processes, ports and directories, and the servers.

Every port of every process is attacked. Ray's ports accept connections of every user; none answers without Ray's token.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from attacks.second_user import (
    Act,
    Attack,
    ask,
    attack_process,
    connect,
    link,
    list_names,
    listening,
    plant,
    read,
    replace,
    won,
)
from support.fleet_on_ray import Fleet

from coldstart.fleet.live.ray_process import run_own_ray
from coldstart.system.paths import Cache
from coldstart.system.proc.tree import ProcessTree

if find_spec("ray") is None:
    pytest.skip("no ray", allow_module_level=True)

# Calls that would show or change the state of Ray's services, one for each service that a port may have.
_CALLS = """
import sys, grpc
calls = {
    "NodeInfoGcsService": "GetAllNodeInfo", "InternalKVGcsService": "InternalKVKeys", "ActorInfoGcsService": "GetAllActorInfo",
    "NodeManagerService": "ShutdownRaylet", "ObjectManagerService": "Push", "CoreWorkerService": "Exit",
    "RayletDriver": "ClusterInfo", "Open": "Door",
}
address = sys.argv[1]
said = set()
for service, method in calls.items():
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{service}/{method}")(b"", timeout=10)
            said.add("OK")
        except grpc.RpcError as error:
            said.add(error.code().name)
print(*sorted(said))
"""
_OPEN = """
import grpc, time
from concurrent.futures import ThreadPoolExecutor
handler = grpc.method_handlers_generic_handler(
    "ray.rpc.Open", {"Door": grpc.unary_unary_rpc_method_handler(lambda request, context: b"state")})
server = grpc.server(ThreadPoolExecutor(1), [handler])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of one server with one running model server."""
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        made.join("one")
        made.wait_until(lambda status: len(status["servers"]) == 1, 180)
        made.deploy("m")
        made.ask("m")
        yield made
    finally:
        made.end()


def _processes(fleet: Fleet) -> list[psutil.Process]:
    return [one for process in fleet.processes for one in ProcessTree(process.pid).list_processes()]


def _answers(address: str) -> set[str]:
    """Return how a gRPC server answers without a token. A port does not know the user, so this one may ask."""
    command = [sys.executable, "-P", "-c", _CALLS, address]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def _where(process: psutil.Process, port: int) -> str:
    address = next(
        one.laddr for one in process.net_connections("inet") if one.laddr and one.laddr.port == port
    )
    host = address.ip.removeprefix("::ffff:")
    return f"{'127.0.0.1' if host in ('::', '0.0.0.0') else host}:{port}"


def _attacks(fleet: Fleet) -> list[Attack]:
    (group,) = fleet.groups(fleet.status(), "m")
    server, runtime = group["url"], fleet.runtime
    processes = _processes(fleet)
    sockets = {
        Path(one.laddr)
        for process in processes
        for one in process.net_connections("unix")
        if one.laddr.startswith("/") and Path(one.laddr).is_socket()
    }
    rays = {path for process in processes for path in _directories(process)}
    assert any(path.name == "raylet" for path in sockets) and rays
    orders = ("/fleet/order", "/fleet/down")
    return [
        Attack("show the fleet's status", ask, f"GET {fleet.url}/fleet/status"),
        *(Attack(f"post {path}", ask, f"POST {fleet.url}{path}") for path in orders),
        Attack("use a model server without the gateway", ask, f"POST {server}/v1/completions"),
        Attack("read the admin key and Ray's token", read, runtime / "up" / "coldstart" / "fleet.json"),
        Attack("read the state", read, fleet.root / "state.json"),
        *(
            Attack(f"{act.__name__} of {name}", act, runtime / name / "coldstart")
            for act in (list_names, plant, link, replace)
            for name in ("up", "one")
        ),
        *(Attack(f"connect to {path}", connect, path) for path in sorted(sockets)),
        *(
            Attack(f"{act.__name__} {path}", act, path)
            for path in sorted(rays)
            for act in (list_names, plant, link)
        ),
        *(attack for one in processes for attack in attack_process(f"{one.name()} {one.pid}", one.pid)),
    ]


def _directories(process: psutil.Process) -> set[Path]:
    """Return the directories of Ray that a process has open files in."""
    return {Path(one.path).parent for one in process.open_files() if "coldstart-ray-" in one.path}


@pytest.mark.slow
def test_no_attack_on_a_fleet_succeeds(fleet: Fleet, stranger: Act) -> None:
    tried = _attacks(fleet)
    assert len(tried) >= 60 and won(stranger, tried) == {}
    assert fleet.ask("m")["model"] == "m"


@pytest.mark.slow
def test_no_port_of_a_fleet_answers_without_a_key(fleet: Fleet, stranger: Act) -> None:
    processes = {one.pid: one for one in _processes(fleet)}
    (group,) = fleet.groups(fleet.status(), "m")
    known = {urlsplit(fleet.url).port, urlsplit(group["url"]).port}
    found = {(pid, port) for pid, port in listening(set(processes)) if port not in known}
    assert {processes[pid].name() for pid, _ in found} >= {"gcs_server", "raylet"}
    for pid, port in sorted(found):
        name, where = processes[pid].name(), _where(processes[pid], port)
        if stranger(lambda where=where: ask(f"GET http://{where}/metrics")) is not None:  # type: ignore[misc]
            pytest.fail(f"{name} shows its metrics at {where}")
        assert "OK" not in _answers(where), f"{name} answers at {where}"


@pytest.mark.slow
def test_call_without_a_token_succeeds_on_an_open_server(stranger: Act) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", _OPEN], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "OK" in _answers(f"127.0.0.1:{int(server.stdout.readline())}")
        server.kill()


@pytest.mark.slow
def test_no_key_of_a_fleet_is_visible_in_a_command_line(fleet: Fleet) -> None:
    shown = " ".join(word for one in _processes(fleet) for word in one.cmdline())
    assert fleet.key not in shown and fleet.token not in shown


@pytest.mark.slow
def test_other_user_cannot_enter_the_sessions_of_a_fleet(
    home: Path, stranger: Callable[[Callable[[], object]], object]
) -> None:
    with run_own_ray(None, Cache.at(home / "cache")) as ray:
        directory = ray.node.log.parent
        sessions = [Path(found) for found, _, _ in os.walk(directory)]
        assert any(path.name == "logs" for path in sessions)
        # Ray opens some of them to everyone: without the directory above them, this test would fail.
        assert any(path.stat().st_mode & stat.S_IWOTH for path in sessions)
        assert directory.stat().st_mode & 0o777 == 0o700
        for path in sessions:
            assert stranger(lambda path=path: os.listdir(path)) is None  # type: ignore[misc]  # noqa: PTH208
            assert stranger(lambda path=path: (path / "planted").symlink_to("/etc/passwd")) is None  # type: ignore[misc]
            assert not (path / "planted").is_symlink()


@pytest.mark.slow
def test_directories_above_the_sessions_of_a_joining_node_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._common.utils import try_to_create_directory
    from ray.scripts import scripts

    from coldstart.fleet.live import ray_process

    sessions = tmp_path / "coldstart-ray-x" / "r"
    monkeypatch.setattr(ray_process, "die_with_supervisor", lambda: None)
    monkeypatch.setattr(scripts, "main", lambda: try_to_create_directory(str(sessions)))
    before = os.umask(0o022)
    try:
        ray_process.main()
    finally:
        os.umask(before)
    assert sessions.stat().st_mode & 0o777 == 0o777
    assert sessions.parent.stat().st_mode & 0o777 == 0o700
