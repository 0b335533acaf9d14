"""The simulated engine against the live server where KV memory binds, by counts that no machine's pace changes.

A pool of a few dozen blocks, three traces (calibration.py's), vLLM's own scheduler and skip-join MLFQ with KV kept on the
host. Each trace is served twice: all at once, where the clock plays next to no part (vLLM's scheduler is paused by its own
API until all of them wait in it, in the trace's order: the API server alone would hand them on over half a second), and
over time at a load of 1.1 of what the pool decodes. How fast the machine is just then is told by the first: the bundle's
iteration times are multiplied by how long that took against how long it takes on the simulated engine. Counts are vLLM's
own and our scheduler's: evictions by its metric; tokens computed again (all that its log of iterations says were computed,
less those that had to be: its metrics count a prompt once however often it is computed); blocks loaded per evicted block;
and mean running (tokens sampled per iteration).

    python benchmarks/calibration_counts.py [--repetitions N] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from calibration import slower  # noqa: E402
from live import model  # noqa: E402
from live.cells import BLOCK_BYTES, OURS, PROACTIVE, REGIMES  # noqa: E402
from live.measure import send  # noqa: E402
from live.servers import HOST, Fleet, Server, bind_client  # noqa: E402
from scheduler_twin import TRACES, requests  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from coldstart.key import inspection  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.scheduling import IterationProfile, SchedulerSettings  # noqa: E402
from coldstart.scheduling.simulate import Outcome, SimSettings, simulate  # noqa: E402
from coldstart.traces import TraceRequest  # noqa: E402

REGIME = REGIMES["kv-bound"]
CAP = ("--batch", str(REGIME.batch))
SERVERS = {"fcfs": ("--scheduler", "fcfs", *CAP), "mlfq": (*OURS, *CAP, *PROACTIVE)}
COUNTS = ("evictions", "recomputed_tokens", "loaded_per_evicted", "mean_running")
LIMIT, LOAD, BLOCK, MOST_TOKENS = 0.15, 1.1, 32, 2048
SETTLED_S = 1.0  # until the last iteration is in the log
GAP_S, GATHERED_S = (
    0.004,
    1.5,
)  # between two requests of a paused server, and until the last is in its scheduler

Row = dict[str, Any]
Sender = Callable[[Server, Sequence[TraceRequest], int], float]


def settings(name: str, bundle: IterationProfile) -> SchedulerSettings:
    told = SchedulerSettings("fcfs", REGIME.batch)
    if name == "mlfq":
        told = replace(told, policy="skip-join-mlfq", alpha_s=float(OURS[OURS.index("--alpha") + 1]))
    return replace(told, profile=bundle.to_json())


def machine() -> SimSettings:
    blocks = int(REGIME.pool[-1]) // BLOCK_BYTES - 1
    return SimSettings(
        token_budget=MOST_TOKENS,
        block_tokens=BLOCK,
        device_blocks=blocks,
        host_blocks=(1 << 28) // BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        link_bytes_s=4e9,
    )


ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+) gen"
)


def counters(server: Server) -> dict[str, float]:
    """vLLM's own preemptions, and our scheduler's counters."""
    totals = server.totals()
    return {"preemptions": totals["work"]["evictions"], **totals["counters"]}


def post(server: Server, path: str) -> None:
    urllib.request.urlopen(f"http://{HOST}:{server.port}{path}", data=b"", timeout=30).close()


def send_at_once(server: Server, rows: Sequence[TraceRequest], seed: int) -> float:
    """Seconds from the scheduler's release, with all of `rows` waiting in their order, to the last one's end."""
    post(server, "/pause?mode=keep")
    ordered = [replace(row, arrival_s=number * GAP_S) for number, row in enumerate(rows)]
    gate = Timer(len(rows) * GAP_S + GATHERED_S, post, (server, "/resume"))
    began = time.monotonic()
    gate.start()
    records = send([server], ordered, seed)[0]
    gate.join()
    last = began + max(record.finished_s or 0.0 for record in records)
    return last - (began + gate.interval)


def send_over_time(server: Server, rows: Sequence[TraceRequest], seed: int) -> float:
    return max(record.finished_s or 0.0 for record in send([server], rows, seed)[0])


def live(server: Server, log: Path, rows: Sequence[TraceRequest], seed: int, sent: Sender) -> Row:
    before, begins = counters(server), log.stat().st_size
    finished_s = sent(server, rows, seed)
    time.sleep(SETTLED_S)
    after = counters(server)
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    with log.open("rb") as file:
        file.seek(begins)
        iterations = ITERATION.findall(file.read().decode(errors="replace"))
    computed = sum(int(context) + int(generated) for context, generated in iterations)
    evicted = moved.get("blocks_evicted", 0.0)
    return {
        "evictions": moved["preemptions"],
        "recomputed_tokens": computed - sum(row.prompt_tokens + row.output_tokens - 1 for row in rows),
        "loaded_per_evicted": moved.get("blocks_loaded", 0.0) / max(1.0, evicted),
        "mean_running": sum(row.output_tokens for row in rows) / max(1, len(iterations)),
        "finished_s": finished_s,
        "moved": moved,
    }


def simulated(rows: Sequence[TraceRequest], outcome: Outcome) -> Row:
    return {
        "evictions": outcome.evictions,
        "recomputed_tokens": outcome.recomputed_tokens,
        "loaded_per_evicted": outcome.blocks_in / max(1, outcome.blocks_evicted),
        "mean_running": sum(row.output_tokens for row in rows) / max(1, outcome.iterations),
        "finished_s": outcome.finished_s,
    }


def runs(
    fleet: Fleet, servers: dict[str, Server], bundle: IterationProfile, options: argparse.Namespace
) -> Iterator[Row]:
    for repetition in range(options.repetitions):
        for number, trace in enumerate(TRACES):
            seed = 100 * (repetition + 1) + number
            for name, server in servers.items():
                told, pool = settings(name, bundle), machine()
                spread = requests(trace, LOAD, options.requests, bundle, seed)
                once = [replace(row, arrival_s=0.0) for row in spread]
                place = {"trace": trace, "scheduler": name, "repetition": repetition, "requests": len(once)}
                log = fleet.work / f"{name}.log"
                found = live(server, log, once, seed, send_at_once)
                pace = found["finished_s"] / simulate(once, bundle, told, pool).finished_s
                # The quanta are the bundle's, on the server too: a slower machine fits fewer tokens into one.
                ours = simulated(once, simulate(once, slower(bundle, pace), told, pool))
                yield {**place, "load": "at once", "pace": pace, "live": found, "simulated": ours}
                spread = [replace(row, arrival_s=row.arrival_s * pace) for row in spread]
                now = slower(bundle, pace)
                found, ours = (
                    live(server, log, spread, seed + 50, send_over_time),
                    simulated(spread, simulate(spread, now, told, pool)),
                )
                yield {**place, "load": LOAD, "pace": pace, "live": found, "simulated": ours}


def errors(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Relative errors of the sums over repetitions, by trace, scheduler and load."""
    keys = dict.fromkeys((row["trace"], row["scheduler"], row["load"]) for row in rows)
    found: dict[str, dict[str, float | None]] = {}
    for key in keys:
        mine = [row for row in rows if (row["trace"], row["scheduler"], row["load"]) == key]
        found[", ".join(map(str, key))] = {name: _error(mine, name) for name in COUNTS}
    return found


def _error(rows: Sequence[Row], name: str) -> float | None:
    ours, real = (sum(row[side][name] for row in rows) for side in ("simulated", "live"))
    return float(ours / real - 1) if real else (None if not ours else float("inf"))


def iterations(bundle_of: Any) -> IterationProfile:
    found = inspection.look_up(bundle_of.model, bundle_of.vllm_args).bundle
    if found is None:
        raise SystemExit("the servers run, but their bundle is not in the store")
    return IterationProfile.from_json(found.json("iterations"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--requests", type=int, default=120)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    about = facts.machine()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # has /pause and /resume
    bind_client()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="counts-") as work:
        fleet = Fleet(Path(work))
        try:
            bundle = REGIME.bundle(str(model.build()))
            bundle = replace(bundle, vllm_args=(*bundle.vllm_args, "--enable-logging-iteration-details"))
            servers = {name: fleet.server(name, bundle, chosen) for name, chosen in SERVERS.items()}
            for row in runs(fleet, servers, iterations(bundle), options):
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if k != "live"}), row["live"], flush=True)
        finally:
            fleet.close()
    each = errors(rows)
    within = {key: all(e is None or abs(e) <= LIMIT for e in found.values()) for key, found in each.items()}
    result = {"kind": "live against simulated", "date": facts.today(), "versions": facts.versions()}
    result |= {
        "command": ["python", "benchmarks/calibration_counts.py", *argv],
        "machine": about,
        "limit": LIMIT,
    }
    finish(
        "scheduling-counts",
        {**result, "within": within, "met": all(within.values()), "errors": each, "rows": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
