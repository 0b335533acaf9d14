"""Bytes that the first `serve` after `materialize` hashes and reads before it starts a process, by release.

The model is a llama of random weights in the page cache. Each release materializes it in an empty cache. Each run plans the
start (`coldstart serve`, up to the launch) in a new process with the cache as `materialize` left it. A byte counts as often as
it is hashed with SHA-256.

Run: python -m benchmarks weights/hashed_before_launch [--runs 5] [--release NAME PYTHON ...]
Time: about 10 minutes
Result: weights-hashed.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import parser
from benchmarks.weights import checkpoint, report
from coldstart.bench.stats import summarize

# 1.06 GiB.
CONFIG = checkpoint.CONFIG | {"num_hidden_layers": 10}
ARGUMENTS = [
    "--max-model-len",
    "256",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "0.2",
    "--kv-cache-memory-bytes",
    "67108864",
]
_PLAN = """
import hashlib, json, sys, threading, time
hashed, lock, real = 0, threading.Lock(), hashlib.sha256
class Counted:
    def __init__(self, data=b"", **_):
        self.state = real()
        self.update(data)
    def update(self, data):
        global hashed
        with lock:
            hashed += memoryview(data).nbytes
        self.state.update(data)
    def __getattr__(self, name):
        return getattr(self.state, name)
hashlib.sha256 = Counted
def read():
    return int(open("/proc/self/io").readline().split()[1])
from pathlib import Path
from coldstart.launch import planning
from coldstart.launch.request import ServeRequest
from coldstart.models import inspection
from coldstart.system.paths import Cache
cache = Cache(Path(sys.argv[2]))
found = inspection.look_up(sys.argv[1], sys.argv[3:], cache=cache)
assert found.bundle is not None
before, began = (hashed, read()), time.monotonic()
plan = planning.plan(ServeRequest(found))
taken = time.monotonic() - began
print(json.dumps({"hashed_bytes": hashed - before[0], "read_bytes": read() - before[1], "seconds": taken}))
"""


def main() -> None:
    """Measure each release and keep the result."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument(
        "--release",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "PYTHON"),
        help="a name and the interpreter that has that release (default: this one)",
    )
    wanted = arguments.parse_args()
    releases = dict(wanted.release) or {"this": sys.executable}
    directory = checkpoint.built(CONFIG)
    rows = [_measure(name, python, directory, wanted.runs) for name, python in releases.items()]
    report.finish("weights-hashed", {"bytes": checkpoint.size(directory), "releases": rows})


def _measure(name: str, python: str, directory: Path, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=checkpoint.home()) as place:
        cache, kept = Path(place) / "cache", Path(place) / "kept"
        command = [Path(python).with_name("coldstart"), "materialize", directory, "--cache-dir", cache]
        subprocess.run([*command, "--", *ARGUMENTS], cwd=place, check=True)
        shutil.copytree(cache, kept, symlinks=True)
        checkpoint.warm(directory)
        samples = []
        for _ in range(runs):
            shutil.rmtree(cache)
            shutil.copytree(kept, cache, symlinks=True)
            asked = [python, "-P", "-c", _PLAN, str(directory), str(cache), *ARGUMENTS]
            done = subprocess.run(asked, cwd=place, check=True, stdout=subprocess.PIPE, text=True)
            samples.append(json.loads(done.stdout.splitlines()[-1]))
    parts = {part: summarize([sample[part] for sample in samples]) for part in samples[0]}
    return {"release": name, **parts}


if __name__ == "__main__":
    main()
