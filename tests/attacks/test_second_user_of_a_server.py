"""A second user of the machine attacks the processes and sockets of a real vLLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from attacks.second_user import Act, Attack, attack_process, connect, overwrite, read, won

from coldstart.system.proc.tree import ProcessTree

SERVE = "serve tiny-llama --mode fresh --on-miss warn --port 0 -- --max-model-len 64"


@pytest.fixture
def server(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "coldstart.commands.cli", *SERVE.split()]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), (home / "log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(120)


def _memory(processes: list[psutil.Process]) -> set[Path]:
    return {
        Path(one.path) for process in processes for one in process.open_files() if "/dev/shm/" in one.path
    }


@pytest.mark.slow
@pytest.mark.vllm
def test_server_listens_on_loopback_and_no_attack_succeeds(
    server: subprocess.Popen[bytes], stranger: Act
) -> None:
    processes = sorted(ProcessTree(server.pid).list_processes(), key=lambda one: one.pid)
    sockets = [one for process in processes for one in process.net_connections("all")]
    # torch's store and gloo listen in the engine, and no option closes their ports: they must not be on a network.
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"} and listening
    paths = {one.laddr for one in sockets if isinstance(one.laddr, str) and one.laddr.startswith("/")}
    assert paths
    attacks = [
        *(Attack(f"connect to {path}", connect, Path(path)) for path in sorted(paths)),
        *(
            Attack(f"{act.__name__} {path}", act, path)
            for path in _memory(processes)
            for act in (read, overwrite)
        ),
        *(attack for one in processes for attack in attack_process(f"{one.name()} {one.pid}", one.pid)),
    ]
    assert won(stranger, attacks) == {}
    assert all(one.is_running() for one in processes)
