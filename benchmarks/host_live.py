"""The live host against its bars: what the gateway costs, cold requests, scale to zero and back, faults.

    python benchmarks/host_live.py --part overhead|cold|cycles|faults|streams|all [--cycles N] [--rounds N] [--requests N]

Real vLLM on the CPU backend over tiny models with engine templates, which it starts where none runs. Gateway and direct are
interleaved, and direct is the same server's own unix socket: no second server, no TCP on that side. Each part replaces
its own member of benchmarks/results/host-live-cpu.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import aiohttp
import psutil
from common import RESULTS

from coldstart.machine import paths
from coldstart.measure.bench.launchers import console

RESULT = RESULTS / "host-live-cpu.json"
ARGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
MODELS = ("tiny-llama", "tiny-qwen2")
NEEDED = {"overhead": 1, "cold": 1, "cycles": 2, "faults": 2, "streams": 0}
EACH = 4
# Clients at once, and the tokens of each of their requests.
LOADS = ((8, 64), (64, 16))
PROMPT = "Once upon a time there was a server that nobody asked for anything"


def table(models: Mapping[str, Mapping[str, Any]], **limits: Any) -> str:
    """A host file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in limits.items()]
    for name, members in models.items():
        lines += [f"[models.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in members.items())]
    return "\n".join(lines) + "\n"


class Live:
    """A host that runs, and its client."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, file: Path, log: Path) -> None:
        self.process, self.url, self.file, self.log = process, url, file, log
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def status(self) -> dict[str, Any]:
        async with self.client.get(self.url + "/status") as answer:
            return dict(await answer.json())

    async def until(self, true: Any, patience_s: float = 120.0) -> dict[str, Any]:
        """The first status that is so."""
        deadline = time.monotonic() + patience_s
        while not true(said := await self.status()):
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.05)
        return said

    async def ask(self, model: str, request: str = "") -> tuple[int, Any]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        named = {"X-Request-Id": request} if request else {}
        async with self.client.post(self.url + "/v1/completions", json=body, headers=named) as answer:
            return answer.status, await answer.json()

    def server_socket(self) -> Path:
        """The unix socket of the one server that runs."""
        (found,) = own_directory().glob("host-*/*.sock")
        return found


def own_directory() -> Path:
    return paths.runtime_dir()


@asynccontextmanager
async def hosting(text: str) -> AsyncIterator[Live]:
    """A host over that file; its end is waited for."""
    with tempfile.TemporaryDirectory() as directory:
        file, log = Path(directory) / "host.toml", Path(directory) / "log"
        file.write_text(text)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*console(), "host", "--host-file", str(file), "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, log.read_text()
        live = Live(process, line.split()[0].decode(), file, log)
        try:
            yield live
        finally:
            await live.client.close()
            process.terminate()
            code = await asyncio.to_thread(process.wait, 60)
            assert code == 143, log.read_text()[-3000:]


async def stream(client: aiohttp.ClientSession, url: str, tokens: int) -> float:
    """Seconds to the first piece of a stream of so many tokens. Fails for one that is not whole."""
    body = {"model": "tiny-llama", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, whole = time.perf_counter(), 0.0, False
    async with client.post(url + "/v1/completions", json={**body, "max_tokens": tokens}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                assert not line.startswith(b'data: {"error"'), line
            whole = whole or line.startswith(b"data: [DONE]")
    assert whole
    return first


def spread(values: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {
        "n": len(values),
        "p50": median(values),
        "p25": low,
        "p75": high,
        "min": min(values),
        "max": max(values),
    }


async def overhead(rounds: int, requests: int) -> dict[str, Any]:
    """First token and throughput, gateway against direct, interleaved."""
    text = table({"tiny-llama": {"args": ARGS, "pinned": True}}, memory="4GiB")
    async with hosting(text) as live:
        await live.until(lambda said: said["models"][0]["state"] == "ready")
        connector = aiohttp.UnixConnector(path=str(live.server_socket()), limit=0)
        async with aiohttp.ClientSession(connector=connector) as direct:
            host = psutil.Process(live.process.pid)
            ways = {"gateway": (live.client, live.url), "direct": (direct, "http://server")}
            await _throughput(host, ways, 8, 2, 16)
            ttft = await _first_tokens(ways, requests)
            rates = {str(n): await _throughput(host, ways, n, rounds, most) for n, most in LOADS}
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
    host: psutil.Process, ways: Mapping[str, Any], concurrency: int, rounds: int, tokens: int
) -> dict[str, Any]:
    """Tokens a second of `concurrency` clients, each with EACH requests one after the other; a ratio per round.

    `gateway_cpu_s_per_token` is the gateway's own processor time, which other work on the machine hardly changes.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    chance, count, cpu = Random(concurrency), concurrency * EACH * tokens, 0.0
    for _ in range(rounds):
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
    return found | {"ratio": spread(ratios), "gateway_cpu_s_per_token": cpu / rounds / count}


async def cold(requests: int) -> dict[str, Any]:
    """Requests to a model that does not run: one start, all answered, in their order at the server."""
    args = [*ARGS, "--enable-log-requests"]
    text = table({"tiny-llama": {"args": args}}, memory="4GiB", max_held=1000)
    async with hosting(text) as live:
        began, asked = time.perf_counter(), []
        for number in range(requests):
            asked.append(asyncio.create_task(live.ask("tiny-llama", str(number))))
            # So that they arrive one after the other: connections of one moment have no order.
            while (await live.status())["requests"]["total"] <= number:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        said = await live.status()
        (log,) = own_directory().glob("host-*/*.log")
        order = [int(n) for n in re.findall(r"Received request cmpl-(\d+)", log.read_text())]
        return {
            "requests": requests,
            "answered": sum(status == 200 for status, _ in answers),
            "starts": said["starts"]["total"],
            "seen_by_server": len(set(order)),
            "out_of_order_at_server": sum(a > b for a, b in pairwise(order)),
            "waited_for_the_start": requests - said["requests"]["hits"],
            "start": said["models"][0]["last_start"],
            "seconds": seconds,
        }


def _left(process: psutil.Process) -> dict[str, int]:
    """What a host holds: descriptors, children, and what lies in shared memory and temporary places."""
    children = process.children(recursive=True)
    return {
        "descriptors": process.num_fds(),
        "processes": len(children),
        "segments": len(list(Path("/dev/shm").iterdir())),
        "runtime_files": sum(1 for _ in own_directory().rglob("*")),
        "temporary_files": sum(1 for _ in paths.temporary_dir().rglob("*")),
        "host_bytes": process.memory_info().rss,
    }


async def cycles(count: int) -> dict[str, Any]:
    """Six models from nothing to serving and back to nothing, again and again."""
    names = [f"m{number}" for number in range(6)]
    models = {
        name: {"model": MODELS[i % 2], "args": ARGS, "idle_s": 0.0, "memory": "1GiB", "start_s": 1.0}
        for i, name in enumerate(names)
    }
    before = {"segments": len(list(Path("/dev/shm").iterdir())), "processes": _processes()}
    async with hosting(table(models, memory="2GiB")) as live:
        process, seconds, marks = psutil.Process(live.process.pid), [], []
        for _ in range(count + 1):
            began = time.perf_counter()
            answers = await asyncio.gather(*(live.ask(name) for name in names))
            assert {status for status, _ in answers} == {200}, answers
            await live.until(lambda said: {m["state"] for m in said["models"]} == {"stopped"})
            seconds.append(time.perf_counter() - began)
            marks.append(_left(process))
        said = await live.status()
    after = {"segments": len(list(Path("/dev/shm").iterdir())), "processes": _processes()}
    hosts = [str(found) for found in own_directory().glob("host-*")]
    return {
        "cycles": count,
        "models": len(names),
        "starts": said["starts"]["total"],
        "failed_starts": said["starts"]["failed"],
        "modes": sorted({one["mode"] for one in said["recent_starts"]}),
        "start_s": spread([one["seconds"] for one in said["recent_starts"]]),
        "cycle_s": spread(seconds[1:]),
        # The first cycle makes what is made once.
        "after_the_first": marks[0],
        "after_the_last": marks[-1],
        "before_the_host": before,
        "after_the_host": after,
        "directories_left": hosts,
    }


def _processes() -> int:
    """Processes that name this project's interpreter."""
    return sum(1 for one in _ours())


def _ours() -> Iterator[psutil.Process]:
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if words and sys.prefix in words[0] and ("coldstart" in " ".join(words) or "VLLM" in words[0]):
            yield one


async def faults() -> dict[str, Any]:
    """A server killed in mid-stream, a model that always fails, and reloads, each beside streams that go on."""
    models: dict[str, Any] = {name: {"args": ARGS, "memory": "1GiB", "start_s": 1.0} for name in MODELS}
    models["broken"] = {"model": "/nowhere/at/all", "memory": "1GiB", "start_s": 1.0}
    async with hosting(table(models, memory="4GiB", backoff_s=0.2)) as live:
        for name in MODELS:
            assert (await live.ask(name))[0] == 200
        return {
            "server_killed": await _killed(live),
            "always_fails": await _failing(live),
            "reload_under_load": await _reloaded(live, models),
        }


async def _bystanders(live: Live, count: int) -> dict[str, int]:
    """Streams of tiny-llama while something happens elsewhere; how many were whole."""
    made = await asyncio.gather(
        *(stream(live.client, live.url, 100) for _ in range(count)), return_exceptions=True
    )
    whole = sum(not isinstance(one, BaseException) for one in made)
    return {"streams": count, "whole": whole}


async def _killed(live: Live) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 8))
    body = {"model": "tiny-qwen2", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    lines: list[bytes] = []
    async with live.client.post(live.url + "/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                lines.append(line)
            if len(lines) == 5:
                said = await live.status()
                os.kill(next(m["pid"] for m in said["models"] if m["name"] == "tiny-qwen2"), signal.SIGKILL)
    await live.until(lambda said: said["models"][1]["state"] == "failed")
    again, tried = 503, 0
    while again == 503:
        tried += 1
        await asyncio.sleep(0.1)
        again = (await live.ask("tiny-qwen2"))[0]
    return {
        "error_event": json.loads(lines[-1].removeprefix(b"data: ")).get("error"),
        "said_done": b"[DONE]" in b"".join(lines),
        "asked_until_it_served_again": tried,
        "status_then": again,
        "bystanders": await beside,
    }


async def _failing(live: Live) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 8))
    answers = []
    for _ in range(20):
        answers.append(await live.ask("broken"))
        await asyncio.sleep(0.1)
    return {
        "statuses": sorted({status for status, _ in answers}),
        "reason": answers[0][1]["error"]["message"],
        "starts_tried": next(m["failures"] for m in (await live.status())["models"] if m["name"] == "broken"),
        "bystanders": await beside,
    }


async def _reloaded(live: Live, models: Mapping[str, Any]) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 24))
    before = (await live.status())["starts"]["total"]
    for number in range(10):
        live.file.write_text(table(models, memory=f"{4 + number}GiB", backoff_s=0.2))
        live.process.send_signal(signal.SIGHUP)
        await live.until(lambda said, number=number: said["host"]["memory_bytes"] == (4 + number) << 30)
    bystanders = await beside
    after = (await live.status())["starts"]["total"]
    return {"reloads": 10, "bystanders": bystanders, "starts_meanwhile": after - before}


async def streams(count: int) -> dict[str, Any]:
    """Streams over servers that need no model, half of whose clients go in the middle: does any get another's pieces?

    The gateway, the servers and the clients are one process, 200 streams at a time over two models.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.fake_upstream import staged, until

    chance, gates, ended = Random(17), asyncio.Semaphore(200), {"whole": 0, "left": 0, "mixed": 0}

    async def one(stage: Any, number: int) -> None:
        model, leaves_at = chance.choice("ab"), chance.choice((None, chance.randrange(20)))
        prompt, seen = f"{model}-{number}", 0
        async with (
            gates,
            stage.post(model=model, prompt=prompt, stream=True, pieces=20, pause_s=0.001) as answer,
        ):
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if json.loads(line.removeprefix(b"data: ")) != {"prompt": prompt, "number": seen}:
                    ended["mixed"] += 1
                seen += 1
                if leaves_at is not None and seen > leaves_at:
                    break
        ended["left" if leaves_at is not None else "whole" if seen == 20 else "mixed"] += 1

    own = psutil.Process()
    with tempfile.TemporaryDirectory() as directory:
        async with staged(Path(directory), memory=20, max_held=1000) as stage:
            await asyncio.gather(*(one(stage, number) for number in range(500)))
            await until(stage.idle)
            ended.update(dict.fromkeys(ended, 0))
            before = {
                "descriptors": own.num_fds(),
                "tasks": len(asyncio.all_tasks()),
                "bytes": own.memory_info().rss,
            }
            await asyncio.gather(*(one(stage, number) for number in range(count)))
            await until(stage.idle)
            await asyncio.sleep(5.0)
            after = {
                "descriptors": own.num_fds(),
                "tasks": len(asyncio.all_tasks()),
                "bytes": own.memory_info().rss,
            }
    return {"streams": count, **ended, "after_500_streams": before, "after_all": after}


def templates(models: Sequence[str]) -> None:
    """An engine template for each of them, where none runs."""
    said = subprocess.run(
        [*console(), "template", "status", "--format", "json"], check=True, capture_output=True
    ).stdout
    running = {one["model"] for one in json.loads(said)["templates"] if one["level"] == "engine"}
    for model in models:
        if model not in running:
            subprocess.run([*console(), "materialize", model, "-q", "--", *ARGS], check=True)
            subprocess.run(
                [*console(), "template", "start", model, "--level", "engine", "--", *ARGS], check=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", default="all", choices=("overhead", "cold", "cycles", "faults", "streams", "all")
    )
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=10_000)
    given = parser.parse_args()
    parts = {
        "overhead": lambda: overhead(given.rounds, given.requests),
        "cold": lambda: cold(given.requests),
        "cycles": lambda: cycles(given.cycles),
        "faults": faults,
        "streams": lambda: streams(given.streams),
    }
    for name, part in parts.items():
        if given.part not in (name, "all"):
            continue
        templates(MODELS[: NEEDED[name]])
        load = os.getloadavg()[0]
        began = time.time()
        found = asyncio.run(part())
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        about = {
            "command": f"python benchmarks/host_live.py {' '.join(sys.argv[1:])}".rstrip(),
            "seconds": time.time() - began,
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
        known[name] = {"about": about, **found}
        RESULT.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({name: known[name]}, indent=1))


if __name__ == "__main__":
    main()
