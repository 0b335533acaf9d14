"""What the fleet costs beside the start itself: `fleet --help`, `fleet status`, and a cold request.

    python benchmarks/fleet_overhead.py [--rounds 20] [--out FILE]

On a real Ray (a head and one node on this machine) over model servers that need no model, behind the real starter. A cold
request's overhead is what its client waits, less the start as its node measures it (from the order to the server's being
ready) and less what the same request takes of the warm server: from gateway to controller to node and back. Each round is
another model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS
from fleet_faults import Fleet

from coldstart.validate.launchers import console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fleet_rig import deployment

RESULT = RESULTS / "fleet-overhead.json"
COMMAND_BAR_S, START_BAR_S = 0.15, 0.05


def _until(check: Any) -> Any:
    deadline = time.monotonic() + 120
    while not (found := check()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
    return found


def _command(fleet: Fleet, *words: str) -> float:
    env = os.environ | {"XDG_RUNTIME_DIR": str(fleet.runtime / "up")}
    began = time.perf_counter()
    subprocess.run([*console(), *words], env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _ask(fleet: Fleet, name: str) -> float:
    began = time.perf_counter()
    fleet.ask(name)
    return time.perf_counter() - began


def _cold(fleet: Fleet, number: int) -> dict[str, float]:
    name = f"m{number}"
    fleet.order("deploy", deployment(name))
    _until(lambda: name in [card["id"] for card in fleet.asked("/v1/models")["data"]])
    cold, warm = _ask(fleet, name), min(_ask(fleet, name) for _ in range(3))
    (model,) = [one for one in fleet.status()["models"] if one["name"] == name]
    start = float(model["groups"][0]["start_s"])
    fleet.order("remove", name)
    _until(lambda: not [one for one in fleet.status()["models"] if one["name"] == name])
    return {"cold_s": cold, "start_s": start, "warm_s": warm, "overhead_s": cold - start - warm}


def _measured(fleet: Fleet, rounds: int) -> dict[str, Any]:
    _until(lambda: fleet.status()["controller"])
    fleet.join("one")
    _until(lambda: fleet.status()["servers"])
    _cold(fleet, 0)  # the starter has imported by then what it needs
    starts = [_cold(fleet, number) for number in range(1, rounds + 1)]
    commands = {
        " ".join(words): [_command(fleet, *words) for _ in range(rounds)]
        for words in (("fleet", "--help"), ("fleet", "status"))
    }
    overhead = median(one["overhead_s"] for one in starts)
    return {
        "cold_request": {
            "rounds": starts,
            "overhead_median_s": overhead,
            "bar_s": START_BAR_S,
            "met": overhead <= START_BAR_S,
        },
        "commands": {
            name: {
                "seconds": found,
                "median_s": median(found),
                "bar_s": COMMAND_BAR_S,
                "met": median(found) <= COMMAND_BAR_S,
            }
            for name, found in commands.items()
        },
    }


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="cf-", dir="/tmp") as place:
        fleet = Fleet(Path(place))
        try:
            found = _measured(fleet, given.rounds)
        finally:
            fleet.end()
    about = {
        "command": f"python benchmarks/fleet_overhead.py {' '.join(sys.argv[1:])}".rstrip(),
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "model_servers": "fake: processes that need no model, behind the real starter",
    }
    given.out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    print(json.dumps({name: one for name, one in found.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
