"""Streams that move between two real vLLM servers with their KV: gaps, tokens and CPU; then faults during moves.

docs/reference/fleet-measurements.md describes the streams, the faults and what each figure counts.

Run: python -m benchmarks fleet/moves [--moves N] [--kills N] [--minutes M]
Time: at most 20 minutes after the first run, which builds the bundles; no fault begins after M minutes
Result: fleet-moves-cpu.json
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from random import Random
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import finish, parser
from benchmarks.fleet.linked import Heard, LinkedFleet, linked_fleet, materialize
from coldstart.contract.arguments import Arguments
from coldstart.contract.handover import sign
from coldstart.fleet.live.control import FleetReplica
from coldstart.fleet.live.state import ModelDeployment
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.host.launches import Launch
from coldstart.host.live.request_router import Ticket

MODEL, PLACES, TOKENS, LENGTHS = "tiny-llama", ("one", "two"), 300, (100, 3000)
WORDS = ["--max-model-len", "4096", "--hf-overrides", '{"max_position_embeddings": 4096}']
WORDS += ["--block-size", "32", "--kv-cache-memory-bytes", str(256 << 20), "--dtype"]
SETTINGS = FleetSettings(most_ranks=1, consolidate=False, retries=8, backoff_s=0.1, backoff_max_s=0.2)
CPU_TOKENS, CPU_ROUNDS, LIMIT_S, MARKS = 2000, 7, 60.0, {"median": 50, "p95": 95, "max": 100}
KINDS, PAUSES_S = ("kill", "cut", "stall"), (0.1, 0.4, 1.0, 2.5)
FAULT_TOKENS, FAULT_LENGTHS = 120, range(100, 1300, 200)
Row = dict[str, Any]
Ids = list[int]
Started = tuple[asyncio.Task[Heard], Ticket, FleetReplica]


class Pair:
    """Two servers of the model in the data type `kind`."""

    def __init__(self, fleet: LinkedFleet, kind: str) -> None:
        self.fleet, self.kind, self.chance, self.tokens = fleet, kind, Random(kind), TOKENS
        launch = Launch(kind, MODEL, Arguments([*WORDS, kind]))
        spec = FleetModel(kind, 10, 10, Costs(library_s=0.1), batch=64, least=2, most=2, idle_s=3600.0)
        fleet.control.deploy(ModelDeployment(launch, spec))

    async def serve(self, ended: str = "") -> None:
        """Wait until both servers serve, the group `ended` does not, and no request is open."""
        now, wait = self.fleet.control, self.fleet.wait_until
        await wait(lambda: ended not in now.core.groups and self.replicas() and not now._tickets)

    def replicas(self) -> list[FleetReplica]:
        """Return both servers; nothing unless both serve."""
        groups = self.fleet.control.core.groups
        found = [one for name, one in self.fleet.control.replicas.items() if name in groups]
        return found if len(found) == len(PLACES) else []

    def prompt(self, length: int = 0) -> Ids:
        return [self.chance.randrange(10, 1900) for _ in range(length or self.chance.randint(*LENGTHS))]

    async def stream(self, prompt: Ids, heard: Heard, temperature: float = 0.0, name: str = "") -> Heard:
        """Request a stream. The gateway cannot always move a sampled one whose token ids are shown."""
        body: Row = {"model": self.kind, "prompt": prompt, "temperature": temperature}
        body |= {"max_tokens": self.tokens, "ignore_eos": True}
        body |= {"cache_salt": name or self.chance.randbytes(8).hex(), "return_token_ids": not temperature}
        return await self.fleet.stream(body, heard, name)

    async def begin(self, prompt: Ids, temperature: float = 0.0) -> Started:
        """Return a stream that has some tokens, and the server that does not have it."""
        heard, name, after = Heard(), self.chance.randbytes(8).hex(), self.chance.randint(5, 40)
        task = asyncio.create_task(self.stream(prompt, heard, temperature, name))
        await self.fleet.wait_until(lambda: len(heard.times) >= after or task.done())
        ticket = next(one for one in self.fleet.control._tickets.values() if one.request_id == name)
        return task, ticket, next(one for one in self.replicas() if one is not ticket.target)


async def measure_move(pair: Pair, temperature: float) -> Row:
    """Move one stream."""
    prompt = pair.prompt()
    task, ticket, target = await pair.begin(prompt, temperature)
    pair.fleet.move(ticket, target)
    heard = await task
    row = {"kind": pair.kind, "prompt": len(prompt), "greedy": not temperature, "error": heard.error}
    row |= {"whole": heard.whole and heard.counted == TOKENS}
    row |= {name: pair.fleet.moved(ticket).get(name) for name in ("made", "gap_s", "with_kv", "reason")}
    return row | ({} if temperature else {"equal": heard.ids == (await pair.stream(prompt, Heard())).ids})


async def measure_cpu(pair: Pair) -> dict[str, float]:
    """Return the CPU seconds in which a target has the KV of a long prompt: loaded, and computed."""
    found = {"loaded_s": list[float](), "computed_s": list[float]()}
    for name in [*found] * CPU_ROUNDS:
        task, ticket, target = await pair.begin(pair.prompt(CPU_TOKENS))
        source, stream = ticket.target, ticket.continuation
        assert source is not None and stream is not None
        pull = await pair.fleet.control.moves._hold_kv(ticket, source, target, stream, at_end=False)
        assert pull is not None, pair.fleet.lines("kv not held")
        kv = sign(target.handover_key, pull)
        before = pair.fleet.cpu_s(target)
        request = stream.build_warmup_request(kv if name == "loaded_s" else None)
        await pair.fleet.control.moves._complete(target, request, LIMIT_S)
        found[name].append(pair.fleet.cpu_s(target) - before)
        task.cancel()
        await pair.serve()
    return {name: median(each) for name, each in found.items()}


async def make_fault(pair: Pair, kind: str, victim: FleetReplica) -> None:
    """Kill or stop a process of the server, or cut its link; end what can be ended after a while."""
    place, family = pair.fleet.processes(victim)
    one, links = pair.chance.choice(family), pair.fleet.links
    fault = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
    links.cut(place) if kind == "cut" else one.send_signal(fault)
    if kind != "kill":
        await asyncio.sleep(pair.chance.choice(PAUSES_S))
        links.reconnect(place) if kind == "cut" else one.send_signal(signal.SIGCONT)


async def measure_faults(pair: Pair, count: int, end_s: float) -> Row:
    """Make `count` faults during moves, fewer if the time `end_s` comes first."""
    pair.tokens = FAULT_TOKENS
    stay = [(one, (await pair.stream(one, Heard())).ids) for one in map(pair.prompt, FAULT_LENGTHS)]
    found, errors, waits = Counter[str](made=0, moved=0, lost=0, differ=0), list[str](), list[float]()
    while found["made"] < count and time.monotonic() < end_s:
        kind, (prompt, ids) = KINDS[found["made"] % len(KINDS)], pair.chance.choice(stay)
        task, ticket, target = await pair.begin(prompt)
        side = pair.chance.choice(("source", "target"))
        victim = ticket.target if side == "source" and isinstance(ticket.target, FleetReplica) else target
        pair.fleet.move(ticket, target)
        await asyncio.sleep(pair.chance.uniform(0, 0.25))
        await make_fault(pair, kind, victim)
        heard = await task
        line = pair.fleet.moved(ticket)
        found.update([f"{kind} of the {side}", "made", *["moved"] * ("gap_s" in line)])
        found["with_kv"] += line.get("with_kv", False)
        found["lost"] += bool(heard.error) or not heard.whole
        found["differ"] += heard.ids != ids
        errors += [f"{kind} of the {side}: {heard.error}"] if heard.error else []
        waits += [b - a for a, b in zip(heard.times, heard.times[1:], strict=False)]
        try:
            await pair.serve(victim.group if kind == "kill" else "")
        except TimeoutError as error:
            errors.append(f"{kind} of the {side}: {error}")
            break
    return {**found, "errors": errors, "longest_wait_s": max(waits, default=0.0)}


async def measure(moves: int, kills: int, end_s: float) -> Row:
    """Run all parts on one fleet."""
    rows, found = list[Row](), {name: Row() for name in ("cpu", "loaded_tokens", "free_s", "faults")}
    async with linked_fleet(SETTINGS) as fleet:
        for name in PLACES:
            fleet.join(ServerSpec(name, 10, 1e9, 1e9))
        await fleet.warm(Launch("template", MODEL, Arguments([*WORDS, "float32"])))
        for kind in ("bfloat16", "float32"):
            pair = Pair(fleet, kind)
            await pair.serve()
            rows += [await measure_move(pair, 0.8 * (number % 2)) for number in range(moves // 2)]
            found["cpu"][kind] = await measure_cpu(pair)
            found["loaded_tokens"][kind] = await fleet.metric("external_prefix_cache_hits_total")
            found["free_s"][kind] = await fleet.free_s(kind, LIMIT_S)
            if kind == "float32":
                found["faults"] = await measure_faults(pair, kills, end_s)
                found["free_s"]["faults"] = await fleet.free_s(kind, LIMIT_S)
            fleet.control.remove(kind)
    gaps = [row["gap_s"] for row in rows if row["gap_s"] is not None] or [0.0]
    return {
        "moved": sum(row["gap_s"] is not None for row in rows),
        "with_kv": sum(bool(row["with_kv"]) for row in rows),
        "broken": sum(bool(row["error"]) or not row["whole"] for row in rows),
        "greedy": sum(row["greedy"] for row in rows),
        "differ": sum(not row.get("equal", True) for row in rows),
        "gap_s": {name: round(float(np.percentile(gaps, at)), 4) for name, at in MARKS.items()},
        **found,
        "rows": rows,
    }


def main() -> None:
    """Measure, and store the result."""
    arguments = parser(__doc__)
    arguments.add_argument("--moves", type=int, default=100)
    arguments.add_argument("--kills", type=int, default=200, help="faults: kills, cuts and stalls")
    arguments.add_argument("--minutes", type=float, default=18.0)
    given = arguments.parse_args()
    for kind in ("bfloat16", "float32"):
        materialize(MODEL, *WORDS, kind)
    began, load = time.monotonic(), os.getloadavg()[0]
    found = asyncio.run(measure(given.moves, given.kills, began + 60 * given.minutes))
    finish("fleet-moves-cpu", {"load_before": load, "run_s": time.monotonic() - began, **found})


if __name__ == "__main__":
    main()
