"""Cost of the gateway: first token and throughput through it and directly, interleaved on one warm server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any

import aiohttp
import psutil

from benchmarks.host.servers import ARGS, MODEL, hosting, spread, stream, table

EACH = 4
# Clients at once, and the tokens of each of their requests.
LOADS = ((8, 64), (64, 16))
AT_LEAST = 3


async def overhead(rounds: int, requests: int, seconds: float) -> dict[str, Any]:
    """Each load gets `rounds` pairs, or as many as `seconds` allow, but AT_LEAST."""
    models = {MODEL: {"args": ARGS, "pinned": True}}
    async with hosting(table(models, memory="4GiB", runtime_template=False)) as live:
        await live.wait_until_ready()
        connector = aiohttp.UnixConnector(path=str(live.server_socket()), limit=0)
        async with aiohttp.ClientSession(connector=connector) as direct:
            host = psutil.Process(live.process.pid)
            ways = {"gateway": (live.client, live.url), "direct": (direct, "http://server")}
            await _throughput(host, ways, 8, 2, 16, seconds)
            ttft = await _first_tokens(ways, requests)
            share = seconds / len(LOADS)
            rates = {str(n): await _throughput(host, ways, n, rounds, most, share) for n, most in LOADS}
        return {"ttft_s": ttft, "throughput": rates}


async def _first_tokens(ways: Mapping[str, Any], requests: int) -> dict[str, Any]:
    seen: dict[str, list[float]] = {name: [] for name in ways}
    chance = Random(5)
    for _ in range(requests):
        for name in chance.sample(list(ways), 2):
            seen[name].append(await stream(*ways[name], 4))
    over = [one - other for one, other in zip(seen["gateway"], seen["direct"], strict=True)]
    found: dict[str, Any] = {name: spread(values) for name, values in seen.items()}
    return found | {
        "over_direct": spread(over),
        "p50_over_direct": found["gateway"]["p50"] - found["direct"]["p50"],
    }


async def _throughput(
    host: psutil.Process, ways: Mapping[str, Any], concurrency: int, rounds: int, tokens: int, seconds: float
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
            client, url = ways[name]

            async def one(client: Any = client, url: str = url) -> None:
                for _ in range(EACH):
                    await stream(client, url, tokens)

            began, used = time.perf_counter(), sum(host.cpu_times()[:2])
            await asyncio.gather(*(one() for _ in range(concurrency)))
            rates[name].append(count / (time.perf_counter() - began))
            cpu += sum(host.cpu_times()[:2]) - used if name == "gateway" else 0.0
    ratios = [a / b for a, b in zip(rates["gateway"], rates["direct"], strict=True)]
    found: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    return found | {"ratio": spread(ratios), "gateway_cpu_s_per_token": cpu / len(ratios) / count}
