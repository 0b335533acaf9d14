"""Streams on a live fleet of two Ray nodes on this machine, real vLLM: a pipeline becomes one worker, and a server is killed.

    python benchmarks/fleet_handover.py [--streams 100] [--tokens 700] [--on-miss warn] [--out FILE]

1. `moved`: a pipeline of two ranks serves N streams at once (each client asks its own prompt again and again) while the engine
   beside the first rank loads; then every stream that is under way is handed over by computing again.
2. `killed`: the one server is killed in the middle of N/5 streams, which go on at the next one.

Each stream is compared, by the ids of its tokens or by its text, with the same one undisturbed on the one worker, and two
undisturbed runs with each other. Greedy, fp32. `gap` is from stopping a stream in the pipeline to its first token of the
worker, as the gateway logs it; `pause` is the longest that a client waited between two pieces of a stream that was under way
at the switch, and `ordinary` the same of those that were not. `--on-miss warn`: ordinary starts where there is no bundle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from common import RESULTS

from coldstart.measure.replay.metrics import percentile
from coldstart.validate.launchers import console

RESULT = RESULTS / "fleet-handover-cpu.json"
BAR_S = 0.35
MODEL = "tiny-llama"
WORDS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456", "--dtype", "float32"]
# So large and so slowly fetched that one server could not keep the limit: two ranks, of which one stays.
DEPLOY = [
    "--start",
    "1",
    "--size",
    "40MB",
    "--memory",
    "50MB",
    "--slo",
    "ttft=30",
    "--max",
    "1",
    "--min",
    "1",
]


class Fleet:
    """A head, two nodes, each with a runtime directory of its own; `up` are more words for the first."""

    def __init__(self, root: Path, *up: str) -> None:
        self.root, self.processes = root, list[subprocess.Popen[bytes]]()
        self.log = root / "up.log"
        process = self._start("up", "fleet", "up", "--port", "0", "--state", str(root / "state"), *up)
        assert process.stdout is not None
        assert process.stdout.readline(), self.log.read_text()
        known = json.loads((root / "up" / "coldstart" / "fleet.json").read_text())
        self.url, self.key, self.ray, self.token = (
            known[one] for one in ("url", "admin_key", "ray", "token")
        )

    def environment(self, name: str) -> dict[str, str]:
        own = {
            "XDG_RUNTIME_DIR": str(self.root / name),
            "TMPDIR": str(self.root),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        return os.environ | own | {"HF_HUB_OFFLINE": "1"}

    def _start(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        (self.root / name).mkdir(mode=0o700)
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*console(), *words],
                env=self.environment(name) | env,
                stdout=subprocess.PIPE if name == "up" else log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    async def join(self, name: str, memory: str = "100MB", network: str = "1MB") -> None:
        """Another node; returns when it is a server."""
        async with aiohttp.ClientSession() as client:
            count = len((await self.status(client))["servers"]) + 1
            words = ("fleet", "join", self.ray, "--memory", memory, "--network", network, "--load", "10GB")
            self._start(name, *words, RAY_AUTH_TOKEN=self.token)

            async def joined() -> bool:
                return len((await self.status(client))["servers"]) == count

            await until(joined, 120)

    def run(self, *words: str, at: str = "up") -> None:
        subprocess.run([*console(), *words], env=self.environment(at), check=True)

    def said_by(self, *words: str, at: str = "up") -> str:
        done = subprocess.run(
            [*console(), *words], env=self.environment(at), check=True, capture_output=True, text=True
        )
        return done.stdout

    async def status(self, client: aiohttp.ClientSession) -> Any:
        headers = {"x-coldstart-admin-key": self.key}
        async with client.get(self.url + "/fleet/status", headers=headers) as answer:
            return await answer.json()

    def said(self, event: str) -> list[dict[str, Any]]:
        """Lines of the gateway's log."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(90)


@contextmanager
def fleet_up(*up: str) -> Iterator[Fleet]:
    """It ends with the block."""
    with tempfile.TemporaryDirectory(prefix="cf-", dir="/tmp") as place:
        made = Fleet(Path(place), *up)
        try:
            yield made
        except BaseException:
            print(made.log.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            made.end()


async def until(check: Callable[[], Awaitable[Any]], patience_s: float) -> Any:
    """What is found at last. Fails after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not (found := await check()):
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.1)
    return found


class Stream:
    """One answer: what the client has of it, and when each piece came."""

    def __init__(self, number: int) -> None:
        self.number, self.ids, self.text = number, list[int](), ""
        self.times: list[float] = []
        self.error = ""

    @property
    def content(self) -> Any:
        return self.text, tuple(self.ids)

    def pause(self) -> float:
        """The longest between two pieces."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def _ask(client: aiohttp.ClientSession, url: str, number: int, tokens: int) -> Stream:
    """Every second client asks for ids, every third for a chat; all by an id of their own."""
    made = Stream(number)
    body: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": tokens, "return_token_ids": number % 2 == 0}
    prompt = f"Story {number}: once upon a time there were {number} servers"
    chat = number % 3 == 0
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        async with client.post(url + path, json=body) as answer:
            if answer.status != 200:
                made.error = f"{answer.status} {(await answer.text())[:200]}"
                return made
            ended = False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    ended = True
                    continue
                said = json.loads(line[6:])
                if "error" in said:
                    made.error = str(said["error"])[:200]
                    return made
                (choice,) = said["choices"]
                made.times.append(time.monotonic())
                made.text += (choice["delta"].get("content") or "") if chat else choice["text"]
                made.ids += choice.get("token_ids") or []
            if not ended:
                made.error = "no last event"
    except (OSError, aiohttp.ClientError) as error:
        made.error = f"{type(error).__name__}: {error}"
    return made


async def _run(client: aiohttp.ClientSession, url: str, count: int, tokens: int) -> list[Stream]:
    return await asyncio.gather(*(_ask(client, url, n, tokens) for n in range(count)))


async def _again_and_again(
    client: aiohttp.ClientSession, url: str, count: int, tokens: int, over: asyncio.Event
) -> list[Stream]:
    async def one(number: int) -> list[Stream]:
        made = []
        while not over.is_set():
            made.append(await _ask(client, url, number, tokens))
        return made

    return [stream for some in await asyncio.gather(*map(one, range(count))) for stream in some]


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median_s": median(values), "p95_s": percentile(sorted(values), 95), "worst_s": max(values)}


def _compared(streams: list[Stream], reference: list[Stream]) -> dict[str, Any]:
    good = [one for one in streams if not one.error]
    differ = [one.number for one in good if one.content != reference[one.number].content]
    errors = sorted({one.error for one in streams if one.error})
    return {
        "streams": len(streams),
        "broken": len(streams) - len(good),
        "errors": errors,
        "differ": len(differ),
    }


async def _moved(fleet: Fleet, client: aiohttp.ClientSession, given: argparse.Namespace) -> dict[str, Any]:
    async def serving(single: bool) -> Any:
        (model,) = (await fleet.status(client))["models"]
        names = [group["name"] for group in model["groups"] if group["phase"] == "serving"]
        return [name for name in names if name.endswith("/whole") is single] or None

    await until(lambda: serving(False), 400)
    over = asyncio.Event()
    asked = asyncio.create_task(_again_and_again(client, fleet.url, given.streams, given.tokens, over))
    loading = time.monotonic()
    await until(lambda: serving(True), 400)
    loaded_s = time.monotonic() - loading

    async def gone() -> Any:
        groups = (await fleet.status(client))["models"][0]["groups"]
        return all(group["name"].endswith("/whole") for group in groups)

    switch = time.monotonic()
    await until(gone, 300)
    switched_s = time.monotonic() - switch
    over.set()
    streams = await asked
    first, second = [await _run(client, fleet.url, given.streams, given.tokens) for _ in range(2)]
    moves = fleet.said("moved")
    gaps = [move["gap_s"] for move in moves]
    during = [one for one in streams if one.times and one.times[0] < switch < one.times[-1]]
    others = [one.pause() for one in streams if not one.error and one not in during]
    return {
        **_compared(streams, first),
        "undisturbed_differ": _compared(second, first)["differ"],
        "moved": len(moves),
        "not_moved": [line["reason"] for line in fleet.said("not moved")],
        "made_when_moved": [min(m["made"] for m in moves), max(m["made"] for m in moves)] if moves else [],
        "loaded_after_s": loaded_s,
        "switch_s": switched_s,
        "gap": _spread(gaps),
        "gaps_within_bar": sum(gap <= BAR_S for gap in gaps),
        "bar_s": BAR_S,
        "pause": _spread([one.pause() for one in during]),
        "ordinary": _spread(others),
    }


async def _killed(fleet: Fleet, client: aiohttp.ClientSession, given: argparse.Namespace) -> dict[str, Any]:
    count = max(4, given.streams // 5)
    (model,) = (await fleet.status(client))["models"]
    (group,) = model["groups"]
    port = int(group["url"].rpartition(":")[2])
    pids = {
        c.pid
        for c in psutil.net_connections("tcp")
        if c.laddr and c.laddr.port == port and c.status == "LISTEN"
    }
    reference = await _run(client, fleet.url, count, given.tokens)
    asked = asyncio.create_task(_run(client, fleet.url, count, given.tokens))
    await asyncio.sleep(median(one.times[-1] - one.times[0] for one in reference) / 3)
    before = (await fleet.status(client))["gateway"]["resumed"]
    killed = time.monotonic()
    for pid in pids:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    streams = await asked
    resumed = (await fleet.status(client))["gateway"]["resumed"] - before
    over = [one for one in streams if one.times[0] < killed < one.times[-1]]
    return {
        **_compared(streams, reference),
        "resumed": resumed,
        "begun_when_killed": len(over),
        "pause": _spread([one.pause() for one in over]),
    }


async def _measured(fleet: Fleet, given: argparse.Namespace) -> dict[str, Any]:
    limits = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=limits, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 22
    ) as client:
        return {
            "moved": await _moved(fleet, client, given),
            "killed": await _killed(fleet, client, given),
        }


def main() -> None:
    """Both parts on one fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--on-miss", default="fail", choices=("fail", "warn"))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    load, began = os.getloadavg()[0], time.time()
    with fleet_up("--ranks", "2") as fleet:
        for name in ("one", "two"):
            asyncio.run(fleet.join(name))
        words = [*DEPLOY, "--batch", str(given.streams + 8), "--on-miss", given.on_miss]
        fleet.run("fleet", "deploy", MODEL, *words, "--", *WORDS)
        found = asyncio.run(_measured(fleet, given))
    about = {
        "command": f"python benchmarks/fleet_handover.py {' '.join(sys.argv[1:])}".rstrip(),
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "starts": "from bundles" if given.on_miss == "fail" else "from bundles where there are any",
    }
    given.out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
