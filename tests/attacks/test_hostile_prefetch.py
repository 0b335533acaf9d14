"""Hostile clients of the prefetcher are refused without an effect on other clients."""

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
from support.prefetching import FILE, checkpoint, prefetcher, status
from support.processes import busy_s, exhaust_descriptors, wait_until
from support.range_server import RangeServer, run_server

from coldstart.system.ipc import json_lines
from coldstart.weights.prefetch import client
from coldstart.weights.prefetch.fetcher import Fetcher


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    (made.parent / "secret").write_bytes(b"not yours")
    return made


@pytest.fixture(scope="module")
def plan(directory: Path) -> dict[str, Any]:
    return checkpoint(directory, tensors=3, size=5000)


@pytest.fixture(scope="module")
def server(directory: Path, plan: dict[str, Any]) -> Iterator[RangeServer]:
    with run_server(directory) as running:
        yield running


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # One connection to the source, opened at once.
    settings = {"COLDSTART_PREFETCH_MEMORY_BYTES": 1 << 20, "COLDSTART_PREFETCH_STREAMS": 1}
    with prefetcher(tmp_path_factory.mktemp("rt"), **settings) as made:
        yield made


@pytest.fixture
def bystander(server: RangeServer, plan: dict[str, Any], directory: Path, runtime: Path) -> Iterator[int]:
    """Yield the prefetcher's pid; another client is served before and after the attack."""
    with client.attach(server.url, plan, names=["t0"], directory=runtime) as attached:
        attached.wait_for_tensors()
        pid = int(status(runtime)["pid"])
        before = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        yield pid
        (entry,) = [tensor for tensor in plan["files"][0]["tensors"] if tensor["name"] == "t1"]
        data = (directory / FILE).read_bytes()[entry["offset"] :][: entry["size"]]
        with client.attach(server.url, plan, names=["t1"], directory=runtime) as other:
            other.wait_for_tensors()
            assert other.map_file(FILE)[entry["offset"] :][: entry["size"]] == data
        assert status(runtime)["pid"] == pid
        # The prefetcher drops a closed connection only after it has read what its client sent.
        wait_until(lambda: status(runtime)["clients"] == 2)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before)  # noqa: PTH208


def _raw(runtime: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    (path,) = client.list_prefetcher_sockets(runtime)
    connection.connect(str(path))
    connection.settimeout(10)
    return connection


def _answer(connection: socket.socket) -> dict[str, Any]:
    with connection, connection.makefile("rb") as lines:
        answer = json.loads(lines.readline() or b"{}")
        with suppress(ConnectionResetError):
            assert lines.read() == b"", "the connection was kept"
    return dict(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100 + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"[" * 60000 + b"\n",
        b'{"op": "format"}\n',
        b'{"op": "attach", "source": "/tmp"}\n',
        b'{"op": "stats"}\n',
        b'{"op": ["stats"]}\n',
        b'{"op": 1e999}\n',
    ],
)
@pytest.mark.usefixtures("bystander")
def test_garbage_is_refused(runtime: Path, data: bytes) -> None:
    connection = _raw(runtime)
    connection.sendall(data)
    assert "refused" in _answer(connection)


@pytest.mark.usefixtures("bystander")
def test_a_line_without_an_end_is_cut_off(runtime: Path) -> None:
    connection = _raw(runtime)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        for _ in range(1000):
            connection.sendall(b"x" * 100_000)
    connection.close()


@pytest.mark.usefixtures("bystander")
def test_silent_client_delays_no_other_client(runtime: Path) -> None:
    silent = [_raw(runtime) for _ in range(50)]
    silent[0].sendall(b'{"op": "sta')
    assert status(runtime)["clients"] >= 51
    for connection in silent:
        connection.close()
    wait_until(lambda: status(runtime)["clients"] == 2)


def test_prefetcher_out_of_descriptors_refuses_without_spinning(bystander: int, runtime: Path) -> None:
    with exhaust_descriptors(bystander):
        turned_away = [_raw(runtime) for _ in range(5)]
        assert busy_s(bystander, 0.5) < 0.25
        assert [connection.recv(1) for connection in turned_away] == [b""] * 5


@pytest.mark.slow
@pytest.mark.usefixtures("bystander")
def test_client_that_never_reads_is_disconnected(runtime: Path) -> None:
    connection = _raw(runtime)
    with pytest.raises(OSError, match=r"Broken pipe|reset|timed out"):
        while True:
            connection.sendall(b'{"op": "status"}\n' * 1000)
    connection.close()


def _changed(plan: dict[str, Any], **file: object) -> dict[str, Any]:
    made = copy.deepcopy(plan)
    made["files"][0].update(file)
    return made


def _tensor(plan: dict[str, Any], **tensor: object) -> dict[str, Any]:
    made = copy.deepcopy(plan)
    made["files"][0]["tensors"][1].update(tensor)
    return made


HOSTILE: list[Callable[[dict[str, Any]], Any]] = [
    lambda plan: _changed(plan, name="../secret"),
    lambda plan: _changed(plan, name="/etc/passwd"),
    lambda plan: _changed(plan, name=".."),
    lambda plan: _changed(plan, name="a\0b"),
    lambda plan: _changed(plan, name=7),
    lambda plan: _changed(plan, size=-1),
    lambda plan: _changed(plan, size=1 << 60),
    lambda plan: _changed(plan, size=1e3),
    lambda plan: _changed(plan, size=True),
    lambda plan: _changed(plan, chunks=[]),
    lambda plan: _changed(plan, chunks=["0" * 63]),
    lambda plan: _changed(plan, tensors=None),
    lambda plan: _tensor(plan, offset=-5),
    lambda plan: _tensor(plan, size=1 << 40),
    lambda plan: _tensor(plan, offset=plan["files"][0]["tensors"][0]["offset"] + 1),
    lambda plan: _tensor(plan, name="t0"),
    lambda plan: _tensor(plan, digest="md5:0"),
    lambda plan: {**plan, "chunk": 0},
    lambda plan: {**plan, "chunk": 1 << 40},
    lambda plan: {**plan, "files": []},
    lambda plan: {**plan, "files": plan["files"] * 2},
    lambda plan: {"chunk": 1},
    lambda plan: [],
]


def _attach(server: RangeServer, runtime: Path, names: list[str] | None, plan: object) -> socket.socket:
    """Send a request that no client checked before."""
    connection = _raw(runtime)
    body = json_lines.create_sealed_memfd(
        json.dumps(names).encode(), json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
    )
    socket.send_fds(connection, [json.dumps({"op": "attach", "source": server.url}).encode() + b"\n"], [body])
    os.close(body)
    return connection


@pytest.mark.parametrize("spoil", HOSTILE)
@pytest.mark.usefixtures("bystander")
def test_a_hostile_plan_is_refused_by_both_sides(
    server: RangeServer, plan: dict[str, Any], runtime: Path, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    spoilt = spoil(plan)
    with pytest.raises((client.PrefetchRefusedError, TypeError)):
        client.attach(server.url, spoilt, directory=runtime)
    assert "with another plan" in _answer(_attach(server, runtime, None, spoilt))["refused"]
    with pytest.raises(client.PrefetchRefusedError, match="plan"):
        Fetcher(server.url, json.dumps(spoilt).encode(), Condition(), streams=1, budget=1 << 20, patience_s=1)


@pytest.mark.usefixtures("bystander")
def test_unwanted_ranges_are_refused(server: RangeServer, plan: dict[str, Any], runtime: Path) -> None:
    with client.attach(server.url, plan, names=["t2"], directory=runtime) as attached:
        for offset, size in ((-8, 16), (0, 8), (10_000, 1 << 40), (0, -5)):
            with pytest.raises(client.PrefetchRefusedError):
                attached.wait_for_bytes(FILE, offset, size)
        with pytest.raises(KeyError):
            attached.map_file("../secret")


@pytest.mark.usefixtures("bystander")
def test_memory_of_others_is_read_only(server: RangeServer, plan: dict[str, Any], runtime: Path) -> None:
    connection = json_lines.Channel(_attach(server, runtime, ["t0"], plan))
    assert "attached" in next(connection.iterate_replies())
    descriptor = connection.take_descriptor()
    for harm in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 0)):
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument|not permitted"):
            harm()
    os.close(descriptor)
    connection.close()
    with client.attach(server.url, plan, names=["t0"], directory=runtime) as attached:
        attached.map_file(FILE)[0:4] = b"mine"
        with client.attach(server.url, plan, names=["t0"], directory=runtime) as other:
            assert other.map_file(FILE)[0:4] != b"mine"
