"""A node's link cut while requests and streams flow: when each goes elsewhere, when the node is dead, what comes back.

    python benchmarks/fleet_partitions.py [--cuts 5] [--out FILE]      # as root

Ray, gateway, controller, server actors and starters are real, each node in a network namespace of its own
(tests/tools/link_cluster.py); the model servers need no model, and each node has one. A cut is a link set down, of the node
that has the requests. Load is that of `fleet_faults.py`: whole answers of 0.3 s and streams that can go on elsewhere, without a
pause; a stream's tokens are compared with the undisturbed ones. `slowest_s` is the longest wait for an answer or a piece of a
stream during a cut; `dead_s` is from the cut until the controller knows of no such server, `back_s` from the link's return
until both nodes serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from common import RESULTS
from fleet_faults import Load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fleet_on_ray import Fleet, of_two
from tools.link_cluster import LinkCluster, lacking, link_cluster

RESULT = RESULTS / "fleet-partitions.json"
REROUTED_BAR_S, DEAD_BAR_S = 3.0, 10.0
ASKED = [("whole answer", "a")] * 6 + [("stream", "a")] * 6
HOLD_S = 3.0


def _serving(fleet: Fleet, status: Any) -> list[str]:
    groups = fleet.groups(status, "a")
    return [one["workers"][0]["server"] for one in groups if one["phase"] == "serving"]


async def _cut(fleet: Fleet, links: LinkCluster, load: Load) -> dict[str, Any]:
    def measured() -> dict[str, Any]:
        before = set(_serving(fleet, fleet.status()))
        again, resumed = (fleet.status()["gateway"][one] for one in ("again", "resumed"))
        # What is asked goes to the first group with room: a cut of the other node would touch nobody.
        name = fleet.busiest("a")
        load.slowest_s, began = 0.0, time.monotonic()
        links.cut(name)
        fleet.until(lambda status: len(status["servers"]) == 1)
        dead_s = time.monotonic() - began
        time.sleep(HOLD_S)
        slowest_s, gateway = load.slowest_s, fleet.status()["gateway"]
        links.mend(name)
        began = time.monotonic()
        found, _ = fleet.until(lambda status: len(now := set(_serving(fleet, status))) == 2 and now, 180)
        return {
            "node": name,
            "slowest_s": slowest_s,
            "dead_s": dead_s,
            "back_s": time.monotonic() - began,
            "again": gateway["again"] - again,
            "resumed": gateway["resumed"] - resumed,
            "kept": len(before & found),
        }

    return await asyncio.to_thread(measured)


async def _measured(fleet: Fleet, links: LinkCluster, cuts: int) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as client:
        load = Load(fleet.url, client)
        tasks = [asyncio.create_task(load.ask(*one)) for one in ASKED]
        await asyncio.sleep(2)
        rows = []
        for _ in range(cuts):
            rows.append(await _cut(fleet, links, load))
            print(json.dumps(rows[-1]), flush=True)
        load.over.set()
        await asyncio.gather(*tasks)
    lost = sum(n for one in load.counts.values() for what, n in one.items() if what not in ("asked", "right"))
    slowest, dead = (max(row[what] for row in rows) for what in ("slowest_s", "dead_s"))
    return {
        "requests": {kind: dict(sorted(found.items())) for kind, found in load.counts.items()},
        "lost": lost,
        "slowest_s": slowest,
        "slowest_met": slowest <= REROUTED_BAR_S,
        "dead_s": dead,
        "dead_met": dead <= DEAD_BAR_S,
        "cuts": rows,
    }


def main() -> None:
    """One fleet, its two nodes cut off in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if reason := lacking():
        raise SystemExit(f"skipped: {reason}")
    load, began = os.getloadavg()[0], time.time()
    with (
        tempfile.TemporaryDirectory(prefix="cp-", dir="/tmp") as place,
        link_cluster() as links,
        of_two(Path(place), memory="10B", links=links) as fleet,
    ):
        fleet.deploy("a", least=2, most=2, batch=40)
        fleet.until(lambda status: len(_serving(fleet, status)) == 2)
        found = asyncio.run(_measured(fleet, links, given.cuts))
    about = {
        "command": f"python benchmarks/fleet_partitions.py --cuts {given.cuts}",
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "model_servers": "fake: processes that need no model, behind the real starter",
    }
    given.out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
