"""The fleet's policies against other means: group sizes against every choice of servers, the ledger against exact shares.

`choose` on random clusters of up to seven unequal servers against all sets of full and other workers (size, full workers, TTFT
and verdict must agree). The ledger's claims on a link shared in rational numbers: nobody admitted may end after its deadline by
more than the clock's rounding, and the bytes moved must be those claimed.

    python benchmarks/fleet_policies.py [--clusters N] [--links N]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from math import inf, isclose
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import finish
from coldstart.fleet.sizing import choose
from coldstart.measure.bench import facts
from tests.support.fleet_oracles import cluster, exhaustive, ledger_run

ROUNDING_S = 1e-6
"""The clock's last bits."""


def sizing(count: int) -> dict[str, object]:
    shapes: Counter[str] = Counter()
    differing = []
    for seed in range(count):
        demand, offers, required, consolidate = cluster(Random(seed))
        found = choose(demand, offers, required=required, consolidate=consolidate)
        wanted = exhaustive(demand, offers, required, consolidate)
        if found is None or wanted is None:
            same = found is None and wanted is None
            shapes["none"] += 1
        else:
            same = (len(found.places), found.full, found.meets) == (*wanted[:2], wanted[3])
            same = same and isclose(found.ttft_s, wanted[2], rel_tol=1e-12)
            shapes[f"s={wanted[0]} w={wanted[1]} {'meets' if wanted[3] else 'late'}"] += 1
        if not same:
            differing.append(seed)
    return {"clusters": count, "differing": differing, "schemes": dict(sorted(shapes.items()))}


def ledger(count: int) -> dict[str, object]:
    admitted = refused = late = 0
    slack, error = inf, 0.0
    for seed in range(count):
        yes, no, least, lost = ledger_run(Random(seed))
        admitted, refused, late = admitted + yes, refused + no, late + (least < -ROUNDING_S)
        slack, error = min(slack, least), max(error, lost)
    return {
        "runs": count,
        "admitted": admitted,
        "refused": refused,
        "runs_with_a_late_worker": late,
        "least_slack_s": slack,
        "rounding_s": ROUNDING_S,
        "bytes_lost_relative": error,
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=10_000)
    parser.add_argument("--links", type=int, default=10_000)
    given = parser.parse_args(argv)
    finish(
        "fleet-policies",
        {
            "kind": "computed",
            "date": facts.today(),
            "command": ["python", "benchmarks/fleet_policies.py", *argv],
            "sizing": sizing(given.clusters),
            "ledger": ledger(given.links),
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
