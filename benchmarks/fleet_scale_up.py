"""A burst for a cold model behind slow links, on two servers: a pipeline that both of its workers grow out of, or two starts.

    python benchmarks/fleet_scale_up.py [--rate 4.5MB] [--pairs 3] [--burst 8] [--prepare] [--out FILE]      # as root

The fleet of `fleet_links.py`: gateway, two servers and the source of the weights each in a network namespace of its own, what
comes into a server limited by tc; real Ray, real vLLM on the CPU, one machine's processors. A worker takes half of the burst
(`--batch`), up to two workers (`--max 2`). All requests are sent at once, of four tokens each.

`independent`: deployed without a limit, so that each server starts the whole model and fetches all of it. `pipeline`: with a
limit for the first token that one link cannot keep and two can; the group serves once each rank has its half, and since the
burst is more than one worker takes, each rank becomes a whole worker behind that. `mean_ttft_s` is over the burst, from
sending it; `whole_s` is when the last worker was whole. Before each start the prefetchers are ended and
their memory with them. Pairs are interleaved, every other one the other way round; the ratio is of each pair. A pipeline that
is started before all of them, and compiles what its ranks run, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import fleet_links
from common import RESULTS
from fleet_links import NODES, WORDS, LinkedFleet, bare, linked_fleet, prepared
from tools.link_cluster import lacking
from weight_path import checkpoint

from coldstart.units import parse_size

RESULT = RESULTS / "fleet-scale-up-cpu.json"
BAR = 1.4
WAYS = ("independent", "pipeline")


def _burst(
    fleet: LinkedFleet, model: Path, way: str, given: argparse.Namespace, alone_s: float
) -> dict[str, Any]:
    fleet.forget()
    limit = ["--slo", f"ttft={0.85 * alone_s:.1f}"] if way == "pipeline" else []
    figures = ["--batch", str(given.burst // 2), "--max", "2", "--weights-from", fleet.source, *limit]
    fleet.run("head", "fleet", "deploy", str(model), "--name", "m", *figures, "--", *WORDS)
    fleet.until(lambda status: [one for one in status["models"] if one["name"] == "m"], "not deployed")
    before = {name: fleet.cluster.received(name) for name in NODES}
    load, began = os.getloadavg()[0], time.monotonic()
    with ThreadPoolExecutor(given.burst) as pool:
        each = list(pool.map(fleet.first_token_s, ["m"] * given.burst))

    def grown(status: Any) -> Any:
        (model,) = status["models"]
        whole = [one for one in model["groups"] if one["phase"] == "serving" and len(one["workers"]) == 1]
        return model["groups"] if len(whole) == len(model["groups"]) == 2 else None

    groups = fleet.until(grown, "the second worker did not come")
    whole_s = time.monotonic() - began
    came = {name: fleet.cluster.received(name) - before[name] for name in NODES}
    fleet.run("head", "fleet", "remove", "m")
    fleet.until(lambda status: not status["models"], "not gone")
    return {
        "way": way,
        "mean_ttft_s": fmean(each),
        "ttft_s": each,
        "whole_s": whole_s,
        "groups": [one["name"] for one in groups],
        "fetched_s": [worker["fetched_s"] for one in groups for worker in one["workers"]],
        "came_in_bytes": came,
        "load_before": load,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of each pair's mean first tokens, beside the bar."""
    pairs = [{row["way"]: row["mean_ttft_s"] for row in rows[n : n + 2]} for n in range(0, len(rows), 2)]
    ratios = [pair["independent"] / pair["pipeline"] for pair in pairs]
    means = {way: median(pair[way] for pair in pairs) for way in WAYS}
    return {"ratios": ratios, "ratio": median(ratios), "bar": BAR, "met": median(ratios) >= BAR, **means}


def main() -> None:
    """Bundles where there are none yet, then the pairs on one fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="4.5MB", help="bytes/s of each server's link")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--prepare", action="store_true", help="make what a run needs, and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if reason := lacking():
        raise SystemExit(f"skipped: {reason}")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    weights = prepared()
    if given.prepare:
        return
    load, began, rate = os.getloadavg()[0], time.time(), float(parse_size(given.rate))
    total, model, rows = checkpoint.size(weights), bare(weights), list[dict[str, Any]]()
    with linked_fleet(weights, rate) as fleet:
        # vLLM keeps what it compiles for a rank in a cache of its own: no bundle has it.
        print(json.dumps({"not_counted": _burst(fleet, model, "pipeline", given, total / rate)}), flush=True)
        for number in range(given.pairs):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                rows.append(_burst(fleet, model, way, given, total / rate))
                print(json.dumps(rows[-1]), flush=True)
    about = {
        "command": f"python benchmarks/fleet_scale_up.py {' '.join(sys.argv[1:])}".rstrip(),
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "rate_bytes_s": rate,
        "model_bytes": total,
        "layers": fleet_links.CONFIG["num_hidden_layers"],
    }
    found = {"about": about, "summary": summary(rows), "rows": rows}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
