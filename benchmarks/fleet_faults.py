"""Random kills in a live fleet under load: what was lost, what not, and whether each loss was named.

    python benchmarks/fleet_faults.py [--kills 50] [--seed 1] [--out FILE]

Ray is real (a head and three nodes on one machine), and so are gateway, controller, server actors, starters, supervisors;
the model servers need no model: processes that answer as vLLM does, token by token. `a` is whole, up to two workers; `p`
starts as a pipeline of two ranks, and becomes one worker by an engine beside the first. Killed, by SIGKILL, is one of: a
process of a model server (whole, rank, or engine beside), a server actor, the controller's actor, a node's raylet, with
which Ray ends the node and all that it serves; `fleet join` begins another.

Asked meanwhile, without a pause: whole answers and streams that can go on elsewhere, which may not be lost; and streams with
logprobs, which cannot go on once they have begun: their loss has to be an error that says so. A stream's tokens are compared
with the undisturbed ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from common import RESULTS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support import fleet_on_ray  # noqa: E402
from support.fake_model import generated  # noqa: E402
from support.fleet_rig import deployment  # noqa: E402

from coldstart.cluster import wire  # noqa: E402

RESULT = RESULTS / "fleet-faults.json"
TOKENS = 60
# Milliseconds until a server is ready.
START = ("--max-model-len", "700")
KINDS = ("process", "process", "process", "actor", "controller", "raylet")


class Fleet(fleet_on_ray.Fleet):
    """A head and its nodes, and who of their processes may be killed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ranks=2)

    def join(self, name: str, network: str = "5B", memory: str = "40B") -> subprocess.Popen[bytes]:
        return super().join(name, network, memory)

    def family(self, among: slice = slice(None)) -> list[psutil.Process]:
        found = []
        for process in self.processes[among]:
            try:
                found += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return found

    def victims(self, kind: str) -> list[psutil.Process]:
        """Processes of that kind."""
        if kind == "raylet":  # not the head's: it is the cluster's end
            return [one for one in self.family(slice(1, None)) if one.name() == "raylet"]
        found = []
        for process in self.family():
            try:
                words, parent = process.cmdline(), process.parent()
                if kind == "process":
                    # What a starter has forked has its words.
                    hit = (
                        "support.fleet_servers" in words and parent is not None and words == parent.cmdline()
                    )
                else:
                    name = "ServerActor" if kind == "actor" else "ControllerActor"
                    hit = bool(words) and words[0].startswith("ray::") and name in words[0]
            except psutil.Error:
                continue
            if hit:
                found.append(process)
        return found


class Load:
    """Those who ask; what came of it."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url, self.client, self.over = url, client, asyncio.Event()
        self.counts: dict[str, Counter[str]] = {}
        self.number = 0
        # When each of those who ask last heard something, and the longest that one waited: whoever wants may set it to 0.
        self.since: dict[int, float] = {}
        self.slowest_s = 0.0

    def _came(self, key: int) -> None:
        now = time.monotonic()
        self.slowest_s, self.since[key] = max(self.slowest_s, now - self.since[key]), now

    async def ask(self, kind: str, model: str) -> None:
        counts, key = self.counts.setdefault(kind, Counter()), len(self.since)
        self.since[key] = time.monotonic()
        while not self.over.is_set():
            self.number += 1
            counts["asked"] += 1
            self.since[key] = time.monotonic()
            counts[await self._one(kind, model, f"p{self.number}", key)] += 1
            self._came(key)

    async def _one(self, kind: str, model: str, prompt: str, key: int) -> str:
        body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0}
        if kind == "whole answer":
            body |= {"pause_s": 0.3}
        else:
            body |= {"stream": True, "max_tokens": TOKENS}
        if kind == "stream with logprobs":
            body |= {"logprobs": 1, "pause_s": 0.02}
        try:
            async with self.client.post(self.url + "/v1/completions", json=body) as answer:
                if answer.status != 200:
                    said = await answer.json()
                    return "named: " + _shape(said["error"]["message"])
                if kind == "whole answer":
                    said = await answer.json()
                    return "right" if said["prompt"] == prompt else "wrong"
                return await self._streamed(answer, kind, prompt, key)
        except (OSError, aiohttp.ClientError) as error:
            return f"unnamed: {type(error).__name__}"

    async def _streamed(self, answer: aiohttp.ClientResponse, kind: str, prompt: str, key: int) -> str:
        made, count, ended = list[int](), 0, False
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                self._came(key)
                said = json.loads(line[6:])
                if "error" in said:
                    return "named: " + _shape(said["error"]["message"])
                count += 1
                if kind != "stream with logprobs":
                    made.append(int(said["choices"][0]["text"]))
        if not ended:
            return "unnamed: no last event"
        right = count == TOKENS and (kind == "stream with logprobs" or made == generated(prompt, TOKENS))
        return "right" if right else "wrong"


def _shape(message: str) -> str:
    """Without the request's id."""
    return message.partition(" (request")[0]


async def _until(check: Callable[[], Awaitable[Any]], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            if await check():
                return
        except (OSError, aiohttp.ClientError, ValueError):
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("not in time")


async def _measured(fleet: Fleet, given: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(given.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as client:
        headers = {"x-coldstart-admin-key": fleet.key}

        async def status() -> Any:
            async with client.get(fleet.url + "/fleet/status", headers=headers) as answer:
                return await answer.json()

        async def deploy(name: str, **figures: Any) -> None:
            made = wire.document(deployment(name, words=START, batch=64, **figures))
            order = {"method": "deploy", "args": [made]}
            async with client.post(fleet.url + "/fleet/order", json=order, headers=headers) as answer:
                assert answer.status == 200, await answer.text()

        for count, name in enumerate(("one", "two", "three"), 1):
            fleet.join(name)

            async def joined(wanted: int = count) -> bool:
                return len((await status())["servers"]) == wanted

            await _until(joined, 120)
        await deploy("a", least=1, most=2)
        await deploy("p", least=1, most=1, ttft_s=1.9)

        async def serve() -> bool:
            models = (await status())["models"]
            return len(models) == 2 and all(
                any(group["phase"] == "serving" for group in model["groups"]) for model in models
            )

        await _until(serve, 60)
        load = Load(fleet.url, client)
        asked = [("whole answer", "a")] * 6 + [("stream", "a")] * 4
        asked += [("stream", "p")] * 4 + [("stream with logprobs", "a")] * 2
        tasks = [asyncio.create_task(load.ask(*one)) for one in asked]
        killed, again_s = Counter[str](), list[float]()
        while sum(killed.values()) < given.kills:
            await asyncio.sleep(chance.uniform(0.3, 2.5))
            kind = chance.choice(KINDS)
            if not (found := await asyncio.to_thread(fleet.victims, kind)):
                continue
            os.kill(chance.choice(sorted(found, key=lambda one: one.pid)).pid, signal.SIGKILL)
            killed[kind] += 1
            # Half of the next kills come while the fleet still mends the last one.
            if chance.random() < 0.5:
                began = time.monotonic()
                await asyncio.sleep(0.5)  # until it is known
                await _until(serve, 120)
                again_s.append(time.monotonic() - began)
        await _until(serve, 120)
        load.over.set()
        await asyncio.gather(*tasks)
        gateway = (await status())["gateway"]
    deaths: Counter[str] = Counter()
    for line in (fleet.root / "recording").read_text().splitlines():
        event = json.loads(line)["event"]
        if event["is"] in ("WorkerDied", "ProcessDied"):
            deaths["of p" if event["worker"].startswith("p#") else "of a"] += 1
    must = [load.counts[kind] for kind in ("whole answer", "stream")]
    lost = sum(count for one in must for what, count in one.items() if what not in ("asked", "right"))
    wrong = sum(one["wrong"] for one in load.counts.values())
    unnamed = sum(
        count for one in load.counts.values() for what, count in one.items() if what.startswith("unnamed")
    )
    return {
        "killed": dict(killed),
        "kills": sum(killed.values()),
        "worker_deaths_told": dict(deaths),
        "requests": {kind: dict(sorted(found.items())) for kind, found in load.counts.items()},
        "lost_that_could_go_on": lost,
        "wrong": wrong,
        "unnamed": unnamed,
        "again": gateway["again"],
        "resumed": gateway["resumed"],
        "moved": gateway["moved"],
        "both_serve_again_s": {"median": sorted(again_s)[len(again_s) // 2], "worst": max(again_s)},
    }


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--log", type=Path, help="keep the gateway's log in this file")
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="cf-", dir="/tmp") as place:
        fleet = Fleet(Path(place))
        try:
            found = asyncio.run(_measured(fleet, given))
        except BaseException:
            print((fleet.root / "up.log").read_text()[-5000:], file=sys.stderr)
            raise
        finally:
            fleet.end()
            if given.log is not None:
                given.log.write_bytes((fleet.root / "up.log").read_bytes())
    left = [one for one in psutil.process_iter(["environ"]) if _of(one, fleet.runtime)]
    about = {
        # Where its files go is not what was measured.
        "command": f"python benchmarks/fleet_faults.py --kills {given.kills} --seed {given.seed}",
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "model_servers": "fake: processes that need no model, behind the real starter",
    }
    found["processes_left"] = len(left)
    given.out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _of(process: psutil.Process, runtime: Path) -> bool:
    found = (process.info["environ"] or {}).get("XDG_RUNTIME_DIR", "")
    return found and Path(found).is_relative_to(runtime)


if __name__ == "__main__":
    main()
