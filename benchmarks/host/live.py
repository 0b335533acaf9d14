"""Cost of the host's gateway: requests to one warm server through the gateway and directly, in turns.

Real vLLM on the CPU with a tiny model, whose bundle is created first. Measured are the time to the first token, and the output
tokens per second of several clients. With `--fleet` the gateway is a fleet's, and its server only paces 64 streams (50/s each).

Run: python -m benchmarks host/live [--fleet] [--seconds N]
Time: 5 to 10 minutes
Result: host-live-cpu.json, or fleet-gateway-cpu.json
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from benchmarks.common import ROOT, about, finish, parser, run_coldstart, spread
from coldstart.system import paths
from coldstart.validate.launchers import find_coldstart_command

MODEL = "tiny-llama"
ARGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
FILE = f"""memory = "4GiB"
runtime_template = false
[models.{MODEL}]
args = {json.dumps(ARGS)}
pinned = true
"""
PROMPT = "Once upon a time there was a server that nobody asked for anything"
BODY = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
# Requests of each client of a round, and by clients at once the tokens of each request.
EACH, LOADS, FLEET_LOADS = 4, {8: 64, 64: 16}, {64: 512}
AT_LEAST, MOST, REQUESTS = 3, 15, 200


@contextmanager
def run_host() -> Iterator[tuple[psutil.Process, str, Callable[[], Way]]]:
    """Run a host with the model; yield its process, its URL, and a function that returns the direct way to a started model."""
    run_coldstart("materialize", MODEL, "-q", "--", *ARGS)
    with tempfile.TemporaryDirectory() as directory:
        file, log = Path(directory) / "host.toml", Path(directory) / "log"
        file.write_text(FILE)
        command = [*find_coldstart_command(), "host", "--host-file", str(file), "--port", "0"]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, cwd=ROOT)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        try:
            url, sockets = line.split()[0].decode(), paths.runtime_dir().glob("host-*/*.sock")
            yield psutil.Process(process.pid), url, lambda: Way("http://server", str(next(sockets)))
        finally:
            process.terminate()
            assert process.wait(60) == 143, log.read_text()[-3000:]


@contextmanager
def run_fleet() -> Iterator[tuple[psutil.Process, str, Callable[[], Way]]]:
    """Run a fleet with the model; yield what `run_host` yields."""
    sys.path.append(str(ROOT / "tests"))
    from support.fleet_on_ray import two_node_fleet  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory, two_node_fleet(Path(directory)) as fleet:
        # The fleet does not see direct streams, and must not stop its server as idle meanwhile.
        fleet.deploy(MODEL, batch=max(FLEET_LOADS), most=1, idle_s=3600.0)
        server = fleet.ask(MODEL)
        yield psutil.Process(fleet.processes[0].pid), fleet.url, lambda: Way(server["url"], key=server["key"])


class Way:
    """One way to the server, and what was measured on it."""

    def __init__(self, url: str, path: str | None = None, key: str = "") -> None:
        # A server closes a connection after five idle seconds, which a request on it would not survive.
        kept: dict[str, Any] = {"limit": 0, "keepalive_timeout": 2.0}
        connector = aiohttp.UnixConnector(path, **kept) if path else aiohttp.TCPConnector(**kept)
        self.url = url + "/v1/completions"
        # The gateway of a fleet, which has the key of its server, asks for the ids of the tokens, too.
        self.body = BODY | ({"return_token_ids": True} if key else {})
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self.client = aiohttp.ClientSession(connector=connector, headers=headers)

    async def stream(self, tokens: int) -> float:
        """Return the seconds to the first piece of a stream; fail if the stream is incomplete."""
        began, first, whole = time.perf_counter(), 0.0, False
        async with self.client.post(self.url, json=self.body | {"max_tokens": tokens}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    assert not line.startswith(b'data: {"error"'), line
                whole = whole or line.startswith(b"data: [DONE]")
        assert whole
        return first

    async def serve(self, clients: int, tokens: int) -> float:
        """Return the tokens per second of clients that send EACH requests one after the other."""

        async def run_client() -> None:
            for _ in range(EACH):
                await self.stream(tokens)

        began = time.perf_counter()
        await asyncio.gather(*(run_client() for _ in range(clients)))
        return clients * EACH * tokens / (time.perf_counter() - began)


async def measure(
    host: psutil.Process, url: str, find_direct: Callable[[], Way], loads: dict[int, int], seconds: float
) -> Any:
    """Measure both ways; each load gets MOST pairs, or as many as `seconds` allow, but AT_LEAST."""
    gateway = Way(url)
    await gateway.stream(1)  # waits for the start
    ways = {"gateway": gateway, "direct": find_direct()}
    try:
        await measure_throughput(host, ways, 8, 64, 2, seconds)
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(REQUESTS):
            for name in Random(number).sample(list(ways), 2):
                seen[name].append(await ways[name].stream(4))
        seen["over_direct"] = [a - b for a, b in zip(*seen.values(), strict=True)]
        return {
            "ttft_s": {name: spread(values) for name, values in seen.items()},
            "throughput": {
                str(count): await measure_throughput(host, ways, count, tokens, MOST, seconds / len(loads))
                for count, tokens in loads.items()
            },
        }
    finally:
        for way in ways.values():
            await way.client.close()


async def measure_throughput(
    host: psutil.Process, ways: dict[str, Way], clients: int, each: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Return tokens per second of requests for `each` tokens, with a ratio for each round.

    `gateway_cpu_s_per_token` is the gateway's own processor time, which other work on the machine hardly changes.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu, end = 0.0, time.monotonic() + seconds
    for number in range(rounds):
        if number >= AT_LEAST and time.monotonic() > end:
            break
        for name in Random(f"{clients}/{number}").sample(list(ways), 2):
            used = sum(host.cpu_times()[:2])
            rates[name].append(await ways[name].serve(clients, each))
            cpu += sum(host.cpu_times()[:2]) - used if name == "gateway" else 0.0
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    tokens = len(ratios) * clients * EACH * each
    found: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    return found | {"ratio": spread(ratios), "gateway_cpu_s_per_token": cpu / tokens}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=480.0, help="about how long the loads take")
    arguments.add_argument("--fleet", action="store_true", help="measure the gateway of a fleet")
    given = arguments.parse_args()
    start, loads = (run_fleet, FLEET_LOADS) if given.fleet else (run_host, LOADS)
    made = about() | {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    with start() as running:
        found = asyncio.run(measure(*running, loads, given.seconds))
    finish("fleet-gateway-cpu" if given.fleet else "host-live-cpu", {"overhead": {"about": made, **found}})


if __name__ == "__main__":
    main()
