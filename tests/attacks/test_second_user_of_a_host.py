"""A second user of the machine attacks a running host: its port, its processes, and the directory of its servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from attacks.second_user import (
    Act,
    Attack,
    ask,
    attack_process,
    connect,
    hold,
    link,
    list_names,
    listening,
    plant,
    read,
    replace,
    won,
)
from support.waiting import wait_until

from coldstart.system import paths
from coldstart.system.proc.tree import ProcessTree

KEY = "the-key-of-this-host"
TESTS = Path(__file__).parents[1]
ROLES = {"starter", "supervisor", "api", "engine"}
MODEL = "a-private-model"


@dataclass(frozen=True)
class Running:
    """A host with one running server."""

    url: str
    process: subprocess.Popen[bytes]
    tree: ProcessTree
    directory: Path

    def request(self, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        named = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, named), timeout=60
        ) as answer:
            return bytes(answer.read())


@pytest.fixture
def host(home: Path) -> Iterator[Running]:
    file = home / "host.toml"
    file.write_text(
        f'memory = "9GiB"\nruntime_template = false\n[models.{MODEL}]\nmemory = "1GiB"\nstart_s = 1.0\n'
    )
    home.chmod(0o755)
    before = os.umask(0o022)
    command = [sys.executable, "-m", "support.chaos_servers", "host", str(file), KEY]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    os.umask(before)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[0].decode()
        (directory,) = paths.runtime_dir().glob("host-*")
        yield Running(url, process, ProcessTree(process.pid), directory)
    finally:
        process.terminate()
        process.wait(60)


def _attacks(host: Running) -> list[Attack]:
    (server,) = host.directory.glob("*.sock")
    keyed = ("/status", "/metrics", "/v1/models", f"/v1/models/{MODEL}", f"/logs/{MODEL}")
    orders = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/stop", "/reload", "/unload")
    upstream = f"/upstream/{MODEL}/metrics"
    named = {one.name() for one in host.tree.look() if one.pid != host.process.pid}
    assert named == ROLES
    return [
        *(Attack(f"get {path}", ask, f"GET {host.url}{path}") for path in (*keyed, upstream)),
        *(Attack(f"post {path}", ask, f"POST {host.url}{path}") for path in (*orders, f"/load/{MODEL}")),
        Attack("connect to a server", connect, server),
        Attack("replace a server's socket", replace, server),
        Attack("read a server's log", read, server.with_suffix(".log")),
        Attack("list the host's directory", list_names, host.directory),
        Attack("plant in the host's directory", plant, host.directory),
        Attack("link from the host's directory", link, host.directory),
        Attack("replace the host's directory", replace, host.directory),
        Attack("hold the host's lock", hold, host.directory.parent / "host.lock"),
        *(
            attack
            for one in host.tree.look()
            for attack in attack_process(f"{one.name()} {one.pid}", one.pid)
        ),
    ]


@pytest.mark.slow
def test_no_attack_on_a_host_succeeds(host: Running, stranger: Act) -> None:
    completion = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
    before = host.request("/v1/completions", completion)
    tried = _attacks(host)
    processes = host.tree.look()
    assert len(tried) >= 50 and won(stranger, tried) == {}
    assert host.tree.look() == processes
    after = host.request("/v1/completions", completion)
    assert before.count(b"data: ") == after.count(b"data: ")


@pytest.mark.slow
def test_host_listens_at_one_port_which_shows_nothing_without_a_key(host: Running, stranger: Act) -> None:
    host.request("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True})
    pids = {one.pid for one in host.tree.look()}
    port = int(host.url.rpartition(":")[2])
    assert listening(pids) == {(host.process.pid, port)}
    # These are open, as documented: liveness, and the page, which asks for the key.
    opened = [Attack(path, ask, f"GET {host.url}{path}") for path in ("/health", "/ui", "/")]
    assert won(stranger, opened).keys() == {"/health", "/ui", "/"}
    for path in ("/health", "/ui", "/"):
        with urllib.request.urlopen(host.url + path, timeout=60) as answer:
            assert MODEL.encode() not in answer.read()


@pytest.mark.slow
def test_no_key_is_visible_in_the_command_lines_of_a_host(host: Running) -> None:
    host.request("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True})
    wait_until(lambda: len(host.tree.look()) > len(ROLES))
    below = [one for one in host.tree.look() if one.pid != host.process.pid]
    assert below and not any(KEY in " ".join(_command(one)) for one in below)


def _command(process: psutil.Process) -> list[str]:
    return list(process.cmdline())
