"""Growth of the start time with the model, for every start mode at four sizes.

The models are built on first use and removed afterwards. Measured on the CPU.

Run: python -m benchmarks start/model_sizes [16M|125M|0.5B|1B ...] [--runs N]
Time: 10 to 40 minutes for each size
Result: model-sizes-cpu.json
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import llama
from benchmarks.common import finish, load, parser, run_coldstart
from benchmarks.start.cold_start import VLLM_ARGS
from coldstart.bench import run_order
from coldstart.launch import modes
from coldstart.models import inspection
from coldstart.system.paths import Cache
from coldstart.system.snapshot.runtime_image import choose_engine_image_directory, measure_size

RESULT = "model-sizes-cpu"
MODES = [mode for mode in run_order.DEFAULT_MODES if mode != run_order.VLLM_COLD]
SIZES = ("16M", "125M", "0.5B", "1B")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("sizes", nargs="*", metavar="SIZE", help="default: all that are missing")
    arguments.add_argument("--runs", type=int, default=3)
    options = arguments.parse_args()
    if unknown := set(options.sizes) - set(SIZES):
        arguments.error(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    rows = (load(RESULT) or {"rows": {}})["rows"]
    caches = Cache.at().root
    caches.mkdir(parents=True, exist_ok=True)
    for size in options.sizes or [size for size in SIZES if size not in rows]:
        with TemporaryDirectory(prefix="sizes-") as place, TemporaryDirectory(dir=caches) as cache:
            rows[size] = measure(size, options.runs, Path(place), Cache(Path(cache)))
        finish(RESULT, {"rows": {known: rows[known] for known in SIZES if known in rows}})


def measure(size: str, runs: int, place: Path, cache: Cache) -> dict[str, Any]:
    """Measure one size and return its row. Raises CalledProcessError if a command fails."""
    model, file = place / size, place / "bench.json"
    weights = llama.build(size, model)

    def run(command: str, *options: str) -> str:
        words = (command, str(model), *options, "--", *VLLM_ARGS)
        return run_coldstart(*words, COLDSTART_CACHE_DIR=str(cache.root))

    built = run("materialize", "--snapshot", "--format", "json")
    modes = ("--modes", ",".join(MODES), "--no-steady", "--runs", str(runs))
    run("bench", *modes, f"--export=json={file}")
    document = json.loads(file.read_text())
    for found in document["modes"].values():
        found.pop("timeline", None)
    return {
        "parameters": weights // 2,  # in bfloat16, beside some kilobytes of headers
        "dtype": "bfloat16",
        "weights_bytes": weights,
        "materialize": {"stages": json.loads(built)["seconds"]},
        "disk_bytes": measure_disk(model, cache),
        **{name: document[name] for name in ("modes", "date", "machine", "versions", "tokens_identical")},
    }


def measure_disk(model: Path, cache: Cache) -> dict[str, int]:
    """Return the bytes that lie on the disk for each mode, weights apart: the bundle, and what is unpacked of it or frozen."""
    bundle = inspection.look_up(str(model), VLLM_ARGS, cache=cache, offline=True).bundle
    assert bundle is not None
    base = sum(section.size for section in bundle.manifest.sections)
    if bundle.has_section("compile"):
        digest = bundle.find_readable_section("compile").digest
        base += measure_size(cache.unpacked / digest.removeprefix("sha256:"))
    engine = choose_engine_image_directory(cache.runtimes, bundle.digest)
    more = {
        modes.RUNTIME_SNAPSHOT.name: measure_size(cache.runtimes),
        modes.SNAPSHOT.name: measure_size(engine),
    }
    return {mode: base + more.get(mode, 0) for mode in MODES if mode != run_order.VLLM_WARM}


if __name__ == "__main__":
    main()
