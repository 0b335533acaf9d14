"""An hour of a live fleet in less memory than its models need: is it as large at the end as it was, and was every answer right?

    python benchmarks/fleet_soak.py --prepare                     # models, bundles, and what plain vLLM answers
    python benchmarks/fleet_soak.py [--minutes 60] [--speed 1.5] [--out FILE]

Ray, gateway, controller, two server actors and their starters are real, and so are the servers: coldstart's supervisors over
vLLM's CPU backend. Twelve tiny models, each of another architecture, fp32; room for five, so that models come and go all
the time. Each node has a runtime template, of which its servers are forked. Arrivals are those of the twelve functions with
the most invocations in shared/traces/azure_functions_2021_sample.csv (1200 s), `--speed` times as fast, again and again.
Requests are greedy, of 8 to 16 tokens, every other one a stream; each answer's token ids are compared with plain vLLM's.

A sample a minute, taken when nothing starts, leaves or answers: of each role how many processes there are, their descriptors
and threads, PSS and RSS; and segments in /dev/shm, files and bytes below the runtime and temporary directories, the cache and
the state. What is flat is said in `flatness.py`; servers and supervisors are judged by resident. (A sample for which there was
no such moment within half a minute is kept, and not judged.)
/dev/shm is everybody's: `unshare -m sh -c 'mount -t tmpfs none /dev/shm && exec python benchmarks/fleet_soak.py'` has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import flatness
from common import RESULTS, real_trace
from fleet_handover import Fleet, fleet_up, until
from hosting.live import bundles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import architectures
from support.plain_vllm import PlainVllm

from coldstart.machine import paths
from coldstart.measure.replay.metrics import percentile
from coldstart.traces import TraceRequest, read_trace
from coldstart.traces.transform import in_order, map_models, speed_up
from coldstart.validate import openai

RESULT = RESULTS / "fleet-soak.json"
NAMES = ("llama", "qwen2", "opt", "qwen3", "gpt2", "phi", "gpt-neox", "mistral", "granite", "olmo2", "stablelm",
         "starcoder2")  # fmt: skip
ARGS = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--dtype", "float32",
        "--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager")  # fmt: skip
# What five of the twelve are said to need.
MEMORY, NODES = 100_000_000, {"one": "300MB", "two": "200MB"}
IDLE_S, TRACE_S, LONGEST = 120.0, 1200.0, 16
PROMPTS = [f"{words} {number}" for number in range(4) for words in ("Once upon a time", "The answer is")]


def place() -> Path:
    """Where models and answers are kept."""
    return paths.Cache.at().models / "fleet-soak"


def prepare() -> None:
    """Models, plain vLLM's answers and bundles, where there are none."""
    plain = PlainVllm(place() / "vllm-caches")
    for name in NAMES:
        model, answers = architectures.build(name, place()), place() / f"{name}.answers.json"
        if not answers.exists():
            words = {"args": ["--model", str(model), *ARGS], "prompts": PROMPTS, "adapter": None}
            found = plain.answers({**words, "tokens": LONGEST}, place() / f"{name}.log")
            assert found is not None, place() / f"{name}.log"
            answers.write_text(json.dumps(found))
    plain.close()
    bundles([str(place() / name) for name in NAMES], ARGS)


def arrivals(speed: float) -> Iterator[TraceRequest]:
    """Endless; each pass of the trace begins where the one before ended."""
    rows = list(in_order(read_trace(real_trace("azure_functions_2021_sample.csv"), "azure-functions")))
    kept = {name for name, _ in Counter(row.model for row in rows).most_common(len(NAMES))}
    once = list(map_models((row for row in rows if row.model in kept), NAMES, "column", 0))
    for number in count():
        for row in speed_up(once, speed):
            yield TraceRequest(
                row.arrival_s + number * TRACE_S / speed, row.prompt_tokens, row.output_tokens, row.model
            )


class Asked:
    """Requests as they arrive, and what came of them."""

    def __init__(self, fleet: Fleet, client: aiohttp.ClientSession) -> None:
        self.fleet, self.client, self.chance = fleet, client, random.Random(11)
        self.answers = {name: json.loads((place() / f"{name}.answers.json").read_text()) for name in NAMES}
        self.counts, self.errors, self.wrong = Counter[str](), Counter[str](), list[dict[str, Any]]()
        self.seconds: list[float] = []

    async def replay(self, speed: float, end: float) -> None:
        """Until `end`, and the last answer."""
        began, tasks = time.monotonic(), set[asyncio.Task[None]]()
        for row in arrivals(speed):
            if began + row.arrival_s >= end:
                break
            await asyncio.sleep(max(0.0, began + row.arrival_s - time.monotonic()))
            task = asyncio.create_task(self._one(str(row.model)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self, name: str) -> None:
        number, tokens = self.chance.randrange(len(PROMPTS)), self.chance.randint(8, LONGEST)
        self.counts["asked"] += 1
        stream = self.counts["asked"] % 2 == 0
        body = openai.build_request(PROMPTS[number], tokens, stream=stream, model=name, token_ids=True)
        began = time.monotonic()
        try:
            ids = await self._ids(body)
        except (OSError, aiohttp.ClientError, openai.ServerError, ValueError, TimeoutError) as error:
            self.errors[f"{type(error).__name__}: {error}"[:300]] += 1
            return
        self.seconds.append(time.monotonic() - began)
        expected = self.answers[name][number][:tokens]
        self.counts["right" if ids == expected else "wrong"] += 1
        if ids != expected and len(self.wrong) < 20:
            self.wrong.append(
                {"model": name, "prompt": number, "stream": stream, "ids": ids, "expected": expected}
            )

    async def _ids(self, body: Mapping[str, Any]) -> list[int]:
        async with self.client.post(self.fleet.url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status} {(await answer.text())[:200]}")
            if not body["stream"]:
                return list((await answer.json())["choices"][0]["token_ids"])
            events = [openai.parse_event(line) async for line in answer.content]
            return [token for event in events if event for token in event.token_ids]

    def summary(self) -> dict[str, Any]:
        took = {
            "median_s": median(self.seconds or [0.0]),
            "p95_s": percentile(sorted(self.seconds or [0.0]), 95),
            "worst_s": max(self.seconds, default=0.0),
        }
        return {**self.counts, "errors": dict(self.errors), "wrong_answers": self.wrong, "answer": took}


class Soak:
    """One run, and its result as far as it has come."""

    def __init__(self, fleet: Fleet, asked: Asked, given: argparse.Namespace) -> None:
        self.fleet, self.asked, self.given = fleet, asked, given
        self.samples: list[dict[str, Any]] = []
        self.starts: dict[str, Any] = {}
        self.began, self.load = time.time(), os.getloadavg()[0]

    async def watch(self, templates: list[int], end: float) -> None:
        """A sample a minute."""
        began = due = time.monotonic()
        while (due := due + self.given.every) <= end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            status, quiet = await self._quiet(due + self.given.every / 2)
            residents = sum(len(model["groups"]) for model in status["models"])
            found = await asyncio.to_thread(self._sample, templates)
            self.samples.append({
                "at_s": time.monotonic() - began, "residents": residents, "starts": status["controller"]["starts"],
                "asked": self.asked.counts["asked"], "quiet": quiet, "load": os.getloadavg()[0], **found,
            })  # fmt: skip
            self.write()

    def _sample(self, templates: list[int]) -> dict[str, Any]:
        roots = [
            (one.pid, "join" if number else "gateway") for number, one in enumerate(self.fleet.processes)
        ]
        places = {"runtime": self.fleet.root, "cache": paths.Cache.at().root, "state": paths.state_dir()}
        return flatness.sample([*roots, *((pid, "template") for pid in templates)], places)

    async def _quiet(self, deadline: float) -> tuple[Any, bool]:
        """The status when nothing starts, leaves or is answered; the last one, and False, if that does not come."""
        while True:
            status = await self.fleet.status(self.asked.client)
            groups = [group for model in status["models"] for group in model["groups"]]
            for one in groups:
                if one["mode"]:
                    self.starts[one["name"]] = one["mode"], one["start_s"], json.dumps(one["fallbacks"])
            held = sum(one["memory_bytes"] - sum(one["free_bytes"]) for one in status["servers"])
            quiet = all(one["phase"] == "serving" and not one["in_flight"] for one in groups)
            # One that was told to leave is no group any more, and holds its memory until it has gone.
            if (quiet := quiet and held == len(groups) * MEMORY) or time.monotonic() > deadline:
                return status, quiet
            await asyncio.sleep(0.2)

    def write(self) -> None:
        seen = list(self.starts.values())
        about = {
            "command": f"python benchmarks/fleet_soak.py {' '.join(sys.argv[1:])}".rstrip(),
            "seconds": time.time() - self.began,
            "load_before": self.load,
            "load_median": median(one["load"] for one in self.samples) if self.samples else self.load,
            "cores": os.cpu_count(),
            "models": len(NAMES), "room_for": 5, "speed": self.given.speed,
        }  # fmt: skip
        starts = {
            "all": self.samples[-1]["starts"] if self.samples else 0,
            "seen": len(seen),
            "modes": Counter(one[0] for one in seen),
            "median_s": median(one[1] for one in seen) if seen else None,
            "fallbacks": Counter(one[2] for one in seen),
        }
        found = {"about": about, "requests": self.asked.summary(), "starts": starts}
        quiet = [one for one in self.samples if one["quiet"]]
        judged = flatness.judged(quiet, "residents", ("server", "supervisor"))
        found |= {"flat": judged, "samples": self.samples}
        draft = self.given.out.with_suffix(".new")
        draft.write_text(json.dumps(found, indent=1) + "\n")
        draft.replace(self.given.out)


async def _soak(fleet: Fleet, given: argparse.Namespace) -> None:
    try:
        for node, memory in NODES.items():
            await fleet.join(node, memory, "1GB")
            fleet.run(
                "template", "start", str(place() / NAMES[0]), "--level", "runtime", "--", *ARGS, at=node
            )
        for name in NAMES:
            figures = ["--memory", str(MEMORY), "--start", "2", "--idle", str(IDLE_S)]
            fleet.run("fleet", "deploy", str(place() / name), "--name", name, *figures, "--", *ARGS)
        await _asked(fleet, given)
    finally:
        for node in NODES:
            fleet.run("template", "stop", "--force", at=node)


async def _asked(fleet: Fleet, given: argparse.Namespace) -> None:
    said = [fleet.said_by("template", "status", "--format", "json", at=node) for node in NODES]
    templates = [int(one["pid"]) for document in said for one in json.loads(document)["templates"]]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as client:

        async def known() -> bool:
            return len((await fleet.status(client))["models"]) == len(NAMES)

        await until(known, 60)
        soak = Soak(fleet, Asked(fleet, client), given)
        end = time.monotonic() + 60 * given.minutes
        await asyncio.gather(soak.asked.replay(given.speed, end), soak.watch(templates, end))
        soak.write()


def main() -> None:
    """Prepare where nothing is prepared, then one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", action="store_true", help="make what a run needs, and measure nothing")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--speed", type=float, default=1.5, help="times the trace's own")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    prepare()
    if given.prepare:
        return
    with fleet_up() as fleet:
        asyncio.run(_soak(fleet, given))
    found = json.loads(given.out.read_text())
    print(json.dumps({key: found[key] for key in ("about", "requests", "starts")}, indent=1))
    print(json.dumps(found["flat"].get("not_flat")))


if __name__ == "__main__":
    main()
