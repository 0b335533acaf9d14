"""Fleet on a real Ray cluster of a head and two more nodes on this machine, with model servers that need no model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.fake_model import generated
from support.fleet_rig import deployment
from tools.link_cluster import LinkCluster

from coldstart.fleet.live import state

TESTS = Path(__file__).parents[1]
PLACES = "one", "two"


class Fleet:
    """Processes, gateway and client of a fleet; with `links` each node has its own network namespace.

    It has its own Ray unless `ray` is the address of one, to which `env` gives access.
    """

    def __init__(
        self,
        root: Path,
        ranks: int = 1,
        links: LinkCluster | None = None,
        ray: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self.processes, self.links = root, list[subprocess.Popen[bytes]](), links
        # Unix sockets in it must have paths of at most 107 bytes; a test's directory may be longer.
        self.runtime = Path(tempfile.mkdtemp(prefix="cf-", dir="/tmp"))
        state_file = str(root / "state.json")
        if links is not None:
            links.add("up")
        host = "127.0.0.1" if links is None else links.address("up")
        up = self._started("up", "-m", "support.fleet_up", state_file, str(ranks), host, ray, **env or {})
        assert up.stdout is not None
        place = json.loads(up.stdout.readline())
        self.url, self.ray = place["url"], place["ray"]
        known = json.loads((self.runtime / "up" / "coldstart" / "fleet.json").read_text())
        self.key, self.token = known["admin_key"], known["token"]

    def _started(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        (self.runtime / name).mkdir(mode=0o700)
        command = [sys.executable, "-P", *words]
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command if self.links is None else self.links.within(name, *command),
                env=os.environ
                | env
                | {
                    "XDG_RUNTIME_DIR": str(self.runtime / name),
                    "PYTHONPATH": str(TESTS),
                    "COLDSTART_CACHE_DIR": str(self.root / "cache"),
                },
                stdout=subprocess.PIPE if name == "up" else log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def join(self, name: str, network: str = "1GB", memory: str = "40B") -> subprocess.Popen[bytes]:
        if self.links is not None:
            self.links.add(name)
        words = ["fleet", "join", self.ray, "--memory", memory, "--network", network, "--load", "1GB"]
        return self._started(name, "-m", "coldstart.commands.cli", *words, RAY_AUTH_TOKEN=self.token)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)
        shutil.rmtree(self.runtime)

    def request(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"x-coldstart-admin-key": self.key})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def status(self) -> Any:
        return self.request("/fleet/status")

    def order(self, method: str, **members: Any) -> None:
        assert self.request("/fleet/order", {"method": method, **state.encode(members)}) == {}

    def ask(self, model: str, **body: Any) -> Any:
        return self.request("/v1/completions", {"model": model, "prompt": "x", **body})

    def wait_until(self, condition: Callable[[Any], Any], seconds: float = 60) -> Any:
        """Wait until `condition(status)` is true; return its value and the seconds waited."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if found := condition(self.status()):
                return found, time.monotonic() - began
            time.sleep(0.1)
        said = {log.stem: log.read_text(errors="replace")[-2000:] for log in self.root.glob("*.log")}
        raise AssertionError(f"not within {seconds} s: {self.status()}\n{said}")

    def deploy(self, name: str, **given: Any) -> None:
        self.order("deploy", deployment=deployment(name, **given))

    def groups(self, status: Any, model: str) -> list[Any]:
        return [group for one in status["models"] if one["name"] == model for group in one["groups"]]

    def busiest(self, model: str) -> str:
        """Return the namespace of the group with the most requests."""
        assert self.links is not None
        groups, _ = self.wait_until(
            lambda status: [one for one in self.groups(status, model) if one["in_flight"]]
        )
        address = urlsplit(max(groups, key=lambda one: int(one["in_flight"]))["url"]).hostname
        return next(name for name in PLACES if self.links.address(name) == address)


@contextmanager
def two_node_fleet(
    root: Path, ranks: int = 1, network: str = "1GB", memory: str = "40B", links: LinkCluster | None = None
) -> Iterator[Fleet]:
    """Yield a fleet of two servers and a head without a server."""
    made = Fleet(root, ranks, links)
    try:
        for count, name in enumerate(PLACES, 1):
            made.join(name, network, memory)
            made.wait_until(lambda status, count=count: len(status["servers"]) == count, 180)  # type: ignore[misc]
        yield made
    finally:
        made.end()


class Streaming:
    """Concurrent streams; `made` has the tokens of each, or its error."""

    def __init__(self, fleet: Fleet, model: str, count: int, length: int) -> None:
        self.fleet, self.model, self.length = fleet, model, length
        self.made: list[list[Any]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def _run(self, number: int) -> None:
        body = {"model": self.model, "prompt": f"p{number}", "stream": True, "max_tokens": self.length}
        data = json.dumps({**body, "temperature": 0}).encode()
        url, headers = self.fleet.url + "/v1/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    self.made[number].append(said.get("error") or int(said["choices"][0]["text"]))

    def is_streaming(self) -> bool:
        return all(map(len, self.made))

    def __enter__(self) -> Streaming:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)
        assert self.made == [generated(f"p{n}", self.length) for n in range(len(self.made))]


class Asking:
    """Client that repeats a request; `failed` lists the errors."""

    def __init__(self, fleet: Fleet, model: str, **body: Any) -> None:
        self.fleet, self.model, self.body = fleet, model, body
        self.answers: list[Any] = []
        self.failed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(self.fleet.ask(self.model, **self.body))
            except urllib.error.HTTPError as error:
                self.failed.append(error.read().decode())
            except OSError as error:
                self.failed.append(str(error))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
