"""Real starts and stops by the hundred: nothing is left behind, nothing hostile stops a start, no kill tears anything.

    python benchmarks/reliability litter|hostile|kills|full [--count N] [--minutes M] [--more] --home DIRECTORY

Everything runs in namespaces of its own (processes, /dev/shm, /tmp, /var/tmp), so whatever is there at the end was left by it.
`--home` keeps the materialized bundle between runs; `--more` adds to the result that is there. Needs root.

litter: rounds of a start and stop by each mode and one of the other ends (killed, refused). After one warm-up of each
kind, no process, open descriptor, shared segment, file or socket may be more than after it.
hostile: plain sections mutated (tests/tools/fuzzed.py), of a bundle that nobody trusted has signed, taken with --untrusted.
Each start must come up and answer, write nothing to vLLM's cache, and call nothing verified.
kills: `--count` times each, `kill -9` of materialize, pull, prune, serve, prefetch and template start at a random moment
(every second time also of the process that outlives the command). The store must be whole, and the next serve plan.
full: a start with each directory that it writes to full. It must come up, answer, and say what it did without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.machine import Machine  # noqa: E402

from benchmarks.common import RESULTS, finish  # noqa: E402
from benchmarks.reliability.full import full  # noqa: E402
from benchmarks.reliability.hostile import hostile  # noqa: E402
from benchmarks.reliability.kills import kills  # noqa: E402
from benchmarks.reliability.litter import litter  # noqa: E402
from benchmarks.reliability.run import Run  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402

PARTS = {"litter": litter, "hostile": hostile, "kills": kills, "full": full}
INSIDE = "COLDSTART_RELIABILITY_INSIDE"


def main() -> None:
    """Parse, go inside, run, keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(PARTS))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--home", type=Path, required=True)
    given = parser.parse_args()
    if INSIDE not in os.environ:
        inside = (
            'for d in /dev/shm /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs $d; done; "$@"; exit $?'
        )
        command = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            inside,
            "sh",
        ]
        words = [sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run([*command, *words], env=os.environ | {INSIDE: "1"}, check=False).returncode)
    name = f"reliability-{given.what}"
    # A shell's background job ignores it, and so would whatever is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.home.mkdir(parents=True, exist_ok=True)
    earlier = json.loads((RESULTS / f"{name}.json").read_text()) if given.more else {}
    run = Run(Machine(given.home.resolve()), time.monotonic() + 60 * given.minutes, random.Random())
    run.counts.update(earlier.get("counts", {}))
    run.findings += earlier.get("findings", [])
    began = time.monotonic()
    PARTS[given.what](run, given.count)
    command = ["python", "benchmarks/reliability", given.what, "--home", "HOME"]
    made = {"date": facts.today(), "command": command, "machine": facts.machine()}
    seconds = round(time.monotonic() - began + earlier.get("seconds", 0.0), 1)
    counts = dict(sorted(run.counts.items()))
    finish(
        name,
        made | {"seconds": seconds, "counts": counts, "found": len(run.findings), "findings": run.findings},
    )


if __name__ == "__main__":
    main()
