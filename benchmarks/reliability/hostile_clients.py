"""One client without a key holds many connections to a gateway, and the streams of other clients do not fail.

A fifth of the connections each sends half of its headers, a slow body, endless headers, or deep JSON, or does not read its
stream. A closed connection is opened again after a pause. Beside them, 20 clients stream and one requests /health,
before and during the attack. The gateway has its default limits and no key. Another process simulates the model's server.

Run: python -m benchmarks reliability/hostile_clients [--connections 2000] [--seconds 40]
Time: about 2 minutes
Result: hostile-clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, about, finish, parser

ATTACKER, GOOD = "127.0.0.2", "127.0.0.1"
STREAMS, PIECES, PAUSE_S, REOPEN_S, PROBE_S = 20, 40, 0.05, 5.0, 0.05
LARGE = "x" * 16384
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_MODEL_SERVER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.fake_upstream import FakeServers, run
from coldstart.host.launches import Launch
async def main():
    await FakeServers(Path(sys.argv[2])).begin(Launch("a", "a"), 60).ready
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
run(main())
"""
_GATEWAY = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support import fake_upstream
class Remote(fake_upstream.FakeServer):
    async def _live(self):
        self.ready.set_result(fake_upstream.Ready("fake", 4242, {"phases": {}, "fallbacks": []}))
        await self.over.wait()
        self.ended.set_result("ended")
fake_upstream.FakeServer = Remote
async def main():
    async with fake_upstream.staged(Path(sys.argv[2])) as stage:
        print(stage.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
fake_upstream.run(main())
"""


class Connection:
    """One TCP connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send `data`. Raises OSError if the gateway disconnected."""
        self.writer.write(data)
        await self.writer.drain()

    async def send_slowly(self, start: bytes, piece: bytes) -> None:
        """Send a piece each second until the gateway disconnects."""
        await self.send(start)
        while not self.reader.at_eof():
            await self.send(piece)
            # `wait_for` of Python 3.11 can lose a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self.reader.read(1 << 16)

    async def send_document(self, body: bytes) -> None:
        """Send a complete request."""
        await self.send(_POST + b"content-length: %d\r\n\r\n" % len(body) + body)


@asynccontextmanager
async def connected(port: int, address: str) -> AsyncIterator[Connection]:
    """Connect from a source address."""
    reader, writer = await asyncio.open_connection(GOOD, port, local_addr=(address, 0))
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def completion(**more: object) -> bytes:
    """Return the body of a request for a stream."""
    return json.dumps({"model": "a", "stream": True, **more}).encode()


async def send_half_headers(one: Connection) -> None:
    """Send a header byte by byte."""
    await one.send_slowly(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"x")


async def send_slow_body(one: Connection) -> None:
    """Send a body of 1 MiB byte by byte."""
    await one.send_slowly(_POST + b"content-length: 1048576\r\n\r\n{", b" ")


async def send_endless_headers(one: Connection) -> None:
    """Send a header without an end."""
    await one.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
    while not one.reader.at_eof():
        await one.send(b"x" * 16384)


async def send_deep_json(one: Connection) -> None:
    """Send 100,000 nested arrays."""
    await one.send_document(b'{"model":"a","prompt":' + b"[" * 100_000)
    await one.reader.read()


async def ignore_stream(one: Connection) -> None:
    """Ask for 160 MB and read nothing."""
    one.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await one.send_document(completion(prompt=LARGE, pieces=10_000))
    while not one.writer.is_closing():
        await asyncio.sleep(1)
        await one.send(b"\r\n")


ATTACKS = (send_half_headers, send_slow_body, send_endless_headers, send_deep_json, ignore_stream)


async def attack(port: int, work: Callable[[Connection], Awaitable[None]], opened: Counter[str]) -> None:
    """Repeat one attack."""
    await asyncio.sleep(random.uniform(0, REOPEN_S))
    while True:
        with suppress(OSError):
            async with connected(port, ATTACKER) as one:
                opened[work.__name__] += 1
                await work(one)
        await asyncio.sleep(REOPEN_S)


async def stream(port: int, number: int, results: Counter[str]) -> None:
    """Repeat a good stream and count how it ends."""
    while True:
        prompt = f"good-{number}"
        try:
            async with connected(port, GOOD) as one:
                await one.send_document(completion(prompt=prompt, pieces=PIECES, pause_s=PAUSE_S))
                found = await one.reader.readuntil(b"[DONE]")
            whole = found.startswith(b"HTTP/1.1 200") and len(re.findall(prompt.encode(), found)) == PIECES
            results["complete" if whole else "wrong"] += 1
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            results[type(error).__name__] += 1


async def probe(port: int, times_s: list[float]) -> None:
    """Measure the time of a new connection and an answer of /health."""
    while True:
        began = time.perf_counter()
        async with connected(port, GOOD) as one:
            await one.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await one.reader.readline()).startswith(b"HTTP/1.1 200")
        times_s.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_S)


def read_rss(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    (found,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found) << 10


async def watch_memory(pid: int, found: list[int]) -> None:
    """Record the resident memory ten times per second."""
    while True:
        found.append(read_rss(pid))
        await asyncio.sleep(0.1)


async def measure(port: int, pid: int, seconds: float) -> dict[str, object]:
    """Run good clients for a while; return their results, times of /health and the gateway's memory."""
    results, times_s, memory = Counter[str](), list[float](), list[int]()
    work = [stream(port, number, results) for number in range(STREAMS)]
    tasks = [asyncio.ensure_future(one) for one in (*work, probe(port, times_s), watch_memory(pid, memory))]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    failed = [task.exception() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": dict(results),
        "probes": len(times_s),
        "probe_errors": [str(error) for error in failed],
        "health_median_ms": round(1000 * statistics.median(times_s), 2),
        "health_p99_ms": round(1000 * statistics.quantiles(times_s, n=100)[98], 2),
        "rss_bytes": max(memory),
    }


@dataclass(frozen=True)
class Started:
    """A process, and the first line of its output."""

    pid: int
    line: str


@contextmanager
def started(program: str, directory: str) -> Iterator[Started]:
    """Run a program until the block ends."""
    command = [sys.executable, "-c", program, str(ROOT / "tests"), directory]
    process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield Started(process.pid, process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


async def run_attack(url: str, pid: int, connections: int, seconds: float) -> dict[str, object]:
    """Measure without and with the attack, which a separate process runs."""
    port = int(url.rpartition(":")[2])
    before = await measure(port, pid, min(20, seconds))
    command = [sys.executable, "-m", "benchmarks.reliability.hostile_clients", "--attack", str(port)]
    attacker = await asyncio.create_subprocess_exec(
        *command, "--connections", str(connections), cwd=ROOT, stdin=-1, stdout=-1
    )
    assert attacker.stdin is not None
    await asyncio.sleep(REOPEN_S)
    during = await measure(port, pid, seconds)
    report, _ = await attacker.communicate(b"\n")
    return {"before": before, "during": during, "attacker": json.loads(report)}


async def run_attacker(port: int, connections: int) -> dict[str, object]:
    """Attack until standard input ends; return the connections opened, and the most at once."""
    opened = Counter[str]()
    tasks = [
        asyncio.ensure_future(attack(port, ATTACKS[number % len(ATTACKS)], opened))
        for number in range(connections)
    ]
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"connections": connections, "opened": dict(opened)}


def main() -> None:
    """Parse, attack, store the result."""
    arguments = parser(__doc__)
    arguments.add_argument("--connections", type=int, default=2000)
    arguments.add_argument("--seconds", type=float, default=40)
    arguments.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.attack is not None:
        print(json.dumps(asyncio.run(run_attacker(given.attack, given.connections))))
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        started(_MODEL_SERVER, directory),
        started(_GATEWAY, directory) as gateway,
    ):
        result = asyncio.run(run_attack(gateway.line, gateway.pid, given.connections, given.seconds))
    finish("hostile-clients", about() | {"seconds": given.seconds, "good_streams": STREAMS} | result)


if __name__ == "__main__":
    main()
