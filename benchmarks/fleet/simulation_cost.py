"""CPU time to simulate a fleet by servers, models and requests, placement by Algorithm 1. Measured.

Servers, models and load grow together, for the same simulated time: one request a second for ten servers of four devices,
models by Zipf's law. A cold start weighs every server with free memory, so the cost of a start grows with the servers.

Run: python -m benchmarks fleet/simulation_cost [--servers N,N,N] [--seconds S]
Time: about 3 minutes
Result: fleet-cost.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import Any

from benchmarks.common import command_line, finish
from coldstart.bench import facts
from coldstart.fleet.configuration import FleetFile
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs
from coldstart.lab.fleet.replay import generated, run

GB = 10**9
MODELS_PER_SERVER, RPS_PER_SERVER, TOKENS = 10, 0.1, 128
COSTS = Costs(2.0, 1.0, 3.0, 0.15, 0.002, 0.5, 0.03)
LIMIT_S, LARGEST = 3600.0, 1000


def fleet(servers: int) -> FleetFile:
    rates = (1.7, 6.7)
    hosts = [ServerSpec(f"s{n}", 24 * GB, rates[n % 2] * GB, 12.0 * GB, 4) for n in range(servers)]
    models = [
        FleetModel(f"m{n}", 13 * GB, 18 * GB, COSTS, ttft_s=7.5, tpot_s=0.1, idle_s=30.0)
        for n in range(servers * MODELS_PER_SERVER)
    ]
    return FleetFile(FleetSettings(beside=False), tuple(hosts), tuple(models))


def cost(servers: int, seconds: float) -> dict[str, Any]:
    file = fleet(servers)
    rows = generated(file, RPS_PER_SERVER * servers, 1.0, seconds, TOKENS, 1)
    began = time.process_time()
    found = run(file, rows)
    used = time.process_time() - began
    row = {
        "servers": servers,
        "models": len(file.models),
        "requests": found["requests"],
        "groups": found["starts"],
    }
    row |= {
        "simulated_s": found["duration_s"],
        "cpu_s": used,
        "ms_per_start": 1e3 * used / max(1, found["starts"]),
    }
    row |= {"ttft_attainment": found["ttft_attainment"], "cold_share": found["cold_share"]}
    print(row, flush=True)
    return row


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", default="10,32,100,316,1000")
    parser.add_argument("--seconds", type=float, default=200.0)
    given = parser.parse_args(argv)
    rows = [cost(int(count), given.seconds) for count in given.servers.split(",")]
    growth = [log(b["cpu_s"] / a["cpu_s"]) / log(b["servers"] / a["servers"]) for a, b in pairwise(rows)]
    largest = rows[-1]
    finish(
        "fleet-cost",
        {
            "kind": "simulated",
            "date": facts.today(),
            "command": command_line(),
            "machine": facts.machine(),
            "growth_exponents": growth,
            "limit_s": LIMIT_S,
            "met": largest["cpu_s"] < LIMIT_S if largest["servers"] >= LARGEST else None,
            "simulated_seconds_per_cpu_second": largest["simulated_s"] / largest["cpu_s"],
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
