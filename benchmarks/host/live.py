"""The live host: cost of the gateway, and requests to a stopped model.

Real vLLM on the CPU with a tiny model, whose bundle and template are created first. `cold` sends requests to a model that
does not run: one start, all answered, in their order. `overhead` asks one warm server through the gateway and directly,
in turns: the first token, and the tokens per second of several clients. Each part replaces its own member of the result.

Run: python -m benchmarks host/live --part overhead|cold|all [--seconds N]
Time: 5 to 15 minutes for each part
Result: host-live-cpu.json
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import aiohttp
import psutil

from benchmarks.common import ROOT, about, finish, load, parser
from coldstart.bench.stats import summarize
from coldstart.system import paths
from coldstart.validate.launchers import coldstart_command

RESULT = "host-live-cpu"
ARGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
MODEL = "tiny-llama"
BODY = {
    "model": MODEL,
    "prompt": "Once upon a time there was a server that nobody asked for anything",
    "temperature": 0,
}
LIMITS = {"memory": "4GiB", "runtime_template": False}
# Requests of each client of a round, and by clients at once the tokens of each request.
EACH, LOADS = 4, {8: 64, 64: 16}
AT_LEAST = 3
Ways = Mapping[str, tuple[aiohttp.ClientSession, str]]


class Live:
    """A running host with a client."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def status(self) -> dict[str, Any]:
        """Return the host's status."""
        async with self.client.get(self.url + "/status") as answer:
            return dict(await answer.json())

    async def ask(self, request: str, model: str = MODEL) -> int:
        """Return the status of a request for a few tokens."""
        body, headers = BODY | {"max_tokens": 4, "model": model}, {"X-Request-Id": request}
        async with self.client.post(self.url + "/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status


Members = Mapping[str, Any]


@asynccontextmanager
async def hosting(
    models: Mapping[str, Members], limits: Members, program: Sequence[str] | None = None
) -> AsyncIterator[Live]:
    """Run a host of these tables of its file, and wait for its end afterwards; `program` replaces `coldstart`."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in limits.items()]
    for name, members in models.items():
        lines += [f"[models.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in members.items())]
    with tempfile.TemporaryDirectory() as directory:
        file, log = Path(directory) / "host.toml", Path(directory) / "log"
        file.write_text("\n".join(lines) + "\n")
        command = [*(program or coldstart_command()), "host", "--host-file", str(file), "--port", "0"]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, cwd=ROOT)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, log.read_text()
        live = Live(process, line.split()[0].decode(), log)
        try:
            yield live
        finally:
            await live.client.close()
            process.terminate()
            code = await asyncio.to_thread(process.wait, 60)
            assert code == 143, log.read_text()[-3000:]


def find_one(pattern: str) -> Path:
    """Return the only file of the running host that matches."""
    (found,) = paths.runtime_dir().glob(f"host-*/{pattern}")
    return found


async def stream(client: aiohttp.ClientSession, url: str, tokens: int) -> float:
    """Return the seconds to the first piece of a stream; fail if the stream is incomplete."""
    body = BODY | {"ignore_eos": True, "stream": True, "max_tokens": tokens}
    began, first, whole = time.perf_counter(), 0.0, False
    async with client.post(url + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                assert not line.startswith(b'data: {"error"'), line
            whole = whole or line.startswith(b"data: [DONE]")
    assert whole
    return first


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and range."""
    known, (low, _, high) = summarize(values), quantiles(values, n=4)
    return {"n": known["n"], "p50": known["median"], "p25": low, "p75": high} | {
        k: known[k] for k in ("min", "max")
    }


async def cold(requests: int) -> dict[str, Any]:
    """Send requests one after the other to a model that does not run."""
    model = {"args": [*ARGS, "--enable-log-requests"]}
    async with hosting({MODEL: model}, LIMITS | {"max_held": 1000}) as live:
        began, asked = time.perf_counter(), []
        for number in range(requests):
            asked.append(asyncio.create_task(live.ask(str(number))))
            # So that they arrive one after the other: connections of one moment have no order.
            while (await live.status())["requests"]["total"] <= number:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        said = await live.status()
        order = [int(n) for n in re.findall(r"Received request cmpl-(\d+)", find_one("*.log").read_text())]
        return {
            "requests": requests,
            "answered": answers.count(200),
            "starts": said["starts"]["total"],
            "seen_by_server": len(set(order)),
            "out_of_order_at_server": sum(a > b for a, b in pairwise(order)),
            "waited_for_the_start": requests - said["requests"]["hits"],
            "start": said["models"][0]["last_start"],
            "seconds": seconds,
        }


async def overhead(rounds: int, requests: int, seconds: float) -> dict[str, Any]:
    """Each load gets `rounds` pairs, or as many as `seconds` allow, but AT_LEAST."""
    async with hosting({MODEL: {"args": ARGS, "pinned": True}}, LIMITS) as live:
        deadline = time.monotonic() + 120
        while (status := await live.status())["models"][0]["state"] != "ready":
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)
        connector = aiohttp.UnixConnector(path=str(find_one("*.sock")), limit=0)
        async with aiohttp.ClientSession(connector=connector) as direct:
            host = psutil.Process(live.process.pid)
            ways: Ways = {"gateway": (live.client, live.url), "direct": (direct, "http://server")}
            await _throughput(host, ways, 8, 2, 16, seconds)
            ttft = await _first_tokens(ways, requests)
            share = seconds / len(LOADS)
            rates = {str(n): await _throughput(host, ways, n, rounds, LOADS[n], share) for n in LOADS}
        return {"ttft_s": ttft, "throughput": rates}


async def _first_tokens(ways: Ways, requests: int) -> dict[str, Any]:
    seen: dict[str, list[float]] = {name: [] for name in ways}
    chance = Random(5)
    for _ in range(requests):
        for name in chance.sample(list(ways), 2):
            seen[name].append(await stream(*ways[name], 4))
    over = [one - other for one, other in zip(seen["gateway"], seen["direct"], strict=True)]
    return {name: spread(values) for name, values in seen.items()} | {"over_direct": spread(over)}


async def _throughput(
    host: psutil.Process, ways: Ways, concurrency: int, rounds: int, tokens: int, seconds: float
) -> dict[str, Any]:
    """Tokens a second of `concurrency` clients, each with EACH requests one after the other; a ratio per round.

    `gateway_cpu_s_per_token` is the gateway's own processor time, which other work on the machine hardly changes.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    chance, count, cpu = Random(concurrency), concurrency * EACH * tokens, 0.0
    deadline = time.monotonic() + seconds
    for done in range(rounds):
        if done >= AT_LEAST and time.monotonic() > deadline:
            break
        for name in chance.sample(list(ways), 2):

            async def one(name: str = name) -> None:
                for _ in range(EACH):
                    await stream(*ways[name], tokens)

            began, used = time.perf_counter(), sum(host.cpu_times()[:2])
            await asyncio.gather(*(one() for _ in range(concurrency)))
            rates[name].append(count / (time.perf_counter() - began))
            cpu += sum(host.cpu_times()[:2]) - used if name == "gateway" else 0.0
    ratios = [a / b for a, b in zip(rates["gateway"], rates["direct"], strict=True)]
    found: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    return found | {"ratio": spread(ratios), "gateway_cpu_s_per_token": cpu / len(ratios) / count}


def prepare(part: str) -> None:
    """Build the bundle of the model, and for `cold` start its engine template if none runs."""
    subprocess.run([*coldstart_command(), "materialize", MODEL, "-q", "--", *ARGS], check=True)
    command = [*coldstart_command(), "template", "status", "--format", "json"]
    known = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["templates"]
    ready = [(one["model"], one["level"]) for one in known if one["ready"]]
    if part == "cold" and (MODEL, "engine") not in ready:
        subprocess.run(
            [*coldstart_command(), "template", "start", MODEL, "--level", "engine", "--", *ARGS], check=True
        )


def main() -> None:
    """Measure one part after the other."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", default="all", choices=("overhead", "cold", "all"))
    arguments.add_argument("--seconds", type=float, default=480.0, help="about how long overhead takes")
    arguments.add_argument("--rounds", type=int, default=15, help="of overhead, at most")
    arguments.add_argument("--requests", type=int, default=200, help="of overhead and cold")
    given = arguments.parse_args()
    for part in ("overhead", "cold") if given.part == "all" else (given.part,):
        prepare(part)
        made = about() | {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
        found = (
            cold(given.requests) if part == "cold" else overhead(given.rounds, given.requests, given.seconds)
        )
        finish(RESULT, (load(RESULT) or {}) | about() | {part: {"about": made, **asyncio.run(found)}})


if __name__ == "__main__":
    main()
