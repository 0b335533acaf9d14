"""A fleet in this process over real vLLM servers, each in a network namespace whose link has a limited rate.

The gateway, the control and the nodes are those of `fleet up` and `fleet join`, without Ray between them. So a benchmark
can move a stream at will, kill a server, and read every decision. The namespaces are those of the tests
(`tests/tools/link_cluster.py`) and need root. This module is also the program of the nodes' starter processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.common import ROOT, run_coldstart
from coldstart.fleet.live import node
from coldstart.fleet.live.control import FleetControl, FleetReplica
from coldstart.fleet.live.orders import RankFetched
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.launches import Launch
from coldstart.host.live import starter
from coldstart.host.live.app import Gateway
from coldstart.host.live.http_server import create_server, format_url, listen
from coldstart.host.live.log import Log
from coldstart.host.live.messages import build_auth_header
from coldstart.host.live.request_router import Ticket
from coldstart.host.live.servers import ModelServer, ServerStarter, stop_by_force
from coldstart.host.live.starter import StartOrder
from coldstart.launch import completions
from coldstart.system.ipc import addresses
from coldstart.system.paths import Cache
from coldstart.weights.prefetch import PrefetchError, client
from tests.tools.link_cluster import LinkCluster, find_missing, link_cluster  # type: ignore[import-not-found]

NAMESPACE, READY_S, POLL_S = "BENCHMARK_NAMESPACE", 180.0, 0.02
CLONE_NEWNS, CLONE_NEWNET, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 0x40000000, 0x1000, 0x4000, 1 << 18
LOCAL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class _LinkedStarter(ServerStarter):
    module = "benchmarks.fleet.linked"


class LinkedNode(node.NodeServers):
    """Model servers in a namespace. Latency is measured to `place`, where the kernel alone accepts connections."""

    def __init__(self, links: LinkCluster, name: str, root: Path) -> None:
        self.directory = root / name
        self.templates = list[ModelServer]()
        self.directory.mkdir(mode=0o700)
        address = links.address(name)
        own = {"XDG_RUNTIME_DIR": str(self.directory), "VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "eth0"}
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        own |= {NAMESPACE: links.within(name)[3], "PYTHONPATH": str(ROOT)}
        servers = _LinkedStarter(self.directory, Cache.at(), offline=True, env=os.environ | own)
        super().__init__(address, servers)
        self._namespace = own[NAMESPACE]
        self._listener = self._within(lambda: socket.create_server((address, 0)))
        self.place = self._listener.getsockname()

    def _within(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work` in a thread whose new sockets belong to the namespace."""
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(self._namespace,)) as pool:
            return pool.submit(work).result()

    async def time_hops(self, places: Sequence[tuple[str, int]]) -> Any:
        measured = super().time_hops(places)
        return await asyncio.to_thread(self._within, lambda: asyncio.run(measured))

    async def warm(self, launch: Launch) -> None:
        """Start a runtime template, from which all servers of this node are forked."""
        template = self.servers.order_start(StartOrder(launch, READY_S, template="runtime"))
        self.templates.append(template)
        await template.ready

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method, as Ray would."""
        return await getattr(self, method)(*args)

    async def _report_fetch_end(self, worker: str, process: Any) -> None:
        """Report the end of a fetch. The prefetcher has the runtime directory of the node, not that of this process."""
        place = self.directory / "coldstart"
        while process.rate_limit is not None:
            found = None
            with suppress(PrefetchError, OSError):
                found = await asyncio.to_thread(client.set_rate_limit, process.rate_limit, directory=place)
            if found is not None and found["ended"]:
                self._report(RankFetched(worker, found["bytes"], found["seconds"], found["limited"]))
                return
            await asyncio.sleep(POLL_S)


@dataclass
class Heard:
    """What a client received of a stream: token ids where it asked for them, and the time of each event with a choice."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    began: float = 0.0
    counted: int = 0
    whole: bool = False
    error: str = ""

    def take(self, line: bytes) -> None:
        """Record a line of the stream."""
        self.whole = self.whole or line.startswith(b"data: [DONE]")
        try:
            event = completions.parse_event(line)
        except completions.ServerError as error:
            self.error = self.error or str(error)
            return
        if event is None:
            return
        self.counted = event.usage.get("completion_tokens", self.counted)
        if event.has_choice:
            self.times.append(time.monotonic())
            self.ids += event.token_ids


class LinkedFleet:
    """Gateway at `url` and control in this process, a client `session`, and the nodes by name."""

    url: str
    session: aiohttp.ClientSession

    def __init__(self, links: LinkCluster, root: Path, settings: FleetSettings) -> None:
        self.links, self.root, self.nodes = links, root, dict[str, LinkedNode]()
        self._sink = io.StringIO()
        self.control = FleetControl(settings, FleetState(None), log=Log(self._sink))
        self._tasks = list[asyncio.Task[None]]()

    def join(self, spec: ServerSpec, rate: float | None = None) -> None:
        """Add a server whose link receives at most `rate` bytes/s."""
        self.links.add(spec.name, rate)
        made = self.nodes[spec.name] = LinkedNode(self.links, spec.name, self.root)
        self.control.add_server(spec, made)
        self._tasks.append(asyncio.create_task(self._hear(made)))

    async def warm(self, launch: Launch) -> None:
        """Start a runtime template on each node."""
        await asyncio.gather(*(made.warm(launch) for made in self.nodes.values()))

    async def _hear(self, made: LinkedNode) -> None:
        after = 0
        while True:
            for number, event in await made.read_events(after):
                after = number
                self.control.workers.process_event(event)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of the log with this event."""
        found = (json.loads(line) for line in self._sink.getvalue().splitlines())
        return [line for line in found if line["event"] == event]

    async def wait_until(self, condition: Callable[[], Any], seconds: float = READY_S) -> Any:
        """Wait until `condition()` is true, and return its value. Raises TimeoutError with the end of the log."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                logs = "".join(log.read_text(errors="replace")[-3000:] for log in self.root.glob("*/*.log"))
                raise TimeoutError(f"{self._sink.getvalue()[-3000:]}\n{logs}")
            await asyncio.sleep(POLL_S)
        return found

    async def stream(self, body: Mapping[str, Any], heard: Heard, name: str = "") -> Heard:
        """Request a stream with the id `name`, and record it in `heard` as it arrives."""
        heard.began = time.monotonic()
        headers = {"X-Request-Id": name} if name else {}
        asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=asked, headers=headers) as answer:
                if answer.status != 200:
                    heard.error = f"{answer.status} {(await answer.text())[:300]}"
                async for line in answer.content:
                    heard.take(line)
        except (aiohttp.ClientError, OSError) as error:
            heard.error = f"{type(error).__name__}: {error}"
        return heard

    def move(self, ticket: Ticket, target: FleetReplica) -> None:
        """Order the move of a stream, as the core does after a consolidation."""
        core = self.control.core
        core._lifecycle.assign(ticket.ticket_id, core.groups[target.group])
        core._agenda.open[ticket.ticket_id].move_target = target.group
        self.control.moves.schedule_move(ticket, target)

    def moved(self, ticket: Ticket) -> dict[str, Any]:
        """Return the log's line about the move of a stream, or the one with the `reason` why it did not move."""
        lines = [*self.lines("moved"), *self.lines("not moved")]
        return next((one for one in lines if one["request"] == ticket.ticket_id), {})

    def processes(self, replica: FleetReplica) -> tuple[str, list[psutil.Process]]:
        """Return the node of a server, and the processes of the server that it needs."""
        worker = self.control.core.groups[replica.group].workers[0]
        up = self.nodes[worker.server].processes[worker.name].up
        assert up is not None and up.pid is not None
        first = psutil.Process(up.pid)
        needed = [one for one in first.children(recursive=True) if "tracker" not in " ".join(one.cmdline())]
        return worker.server, [first, *needed]

    def cpu_s(self, replica: FleetReplica) -> float:
        """Return the CPU time of a server so far."""
        threads = (Path(f"/proc/{one.pid}/task").glob("*/schedstat") for one in self.processes(replica)[1])
        return sum(int(file.read_text().split()[0]) for files in threads for file in files) / 1e9

    async def metric(self, name: str) -> float:
        """Return the sum of a metric of vLLM over all servers that serve."""
        total = 0.0
        for replica in self.control.replicas.values():
            own = build_auth_header(replica.key)
            async with await replica.upstream.request("GET", "/metrics", headers=own) as answer:
                lines = (await answer.read()).decode().splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        return total

    async def free_s(self, model: str, limit_s: float) -> float:
        """Return the time until vLLM counts no used block, while the servers get short requests. Raises TimeoutError."""
        began, body = time.monotonic(), json.dumps({"model": model, "prompt": [1], "max_tokens": 2}).encode()
        async with asyncio.timeout(limit_s):
            while await self.metric("kv_cache_usage_perc"):
                for replica in self.control.replicas.values():
                    await self.control.moves._complete(replica, body, limit_s)
                await asyncio.sleep(POLL_S)
        return time.monotonic() - began

    async def end(self) -> None:
        """Stop all servers."""
        self.control.close()
        for task in self._tasks:
            task.cancel()
        for made in self.nodes.values():
            await made.clear()
            for template in made.templates:
                await stop_by_force(template)
            client.request("stop", directory=made.directory / "coldstart")
            made._listener.close()
            await made.servers.close()


@asynccontextmanager
async def linked_fleet(settings: FleetSettings) -> AsyncIterator[LinkedFleet]:
    """Yield a fleet without servers. Raises SystemExit where no namespaces can be made."""
    if reason := find_missing():
        raise SystemExit(f"error: cannot make the fleet's links: {reason}")
    # A port is bound in the namespace of its server, whose addresses this process does not have.
    vars(node)["find_free_port"] = lambda host: addresses.find_free_port()
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/tmp") as place, link_cluster() as links:
        fleet, endpoint = LinkedFleet(links, Path(place), settings), GatewayEndpoint(port=0)
        with listen(endpoint) as sock:
            fleet.url = format_url(sock, endpoint)
            server = create_server(Gateway(fleet.control, endpoint=endpoint))
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            try:
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
                never = aiohttp.ClientTimeout(None)
                async with aiohttp.ClientSession(connector=connector, timeout=never) as fleet.session:
                    yield fleet
            finally:
                server.stop(at_once=True)
                await fleet.end()
                await serving


def materialize(model: str, *words: str) -> None:
    """Build the bundle of a model, if there is none. Its ranks are processes of this machine, which may have few cores."""
    run_coldstart("materialize", model, "-q", "--", *words, **LOCAL)


def _enter(namespace: str) -> None:
    """Move this thread to a network namespace, and look up no names: each lookup would wait 10 s for a server outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        failed = libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS)
    failed = failed or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    if failed or libc.mount(b"/dev/null", b"/etc/resolv.conf", None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


if __name__ == "__main__":
    _enter(os.environ.pop(NAMESPACE))
    del os.environ["PYTHONPATH"]
    starter.main(int(sys.argv[1]))
