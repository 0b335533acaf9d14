"""Growth of the start time with the model, for every start mode at four sizes.

Importing and forking cost the same for every model; the weights grow. The models are llamas of random weights in bfloat16,
built on first use and removed afterwards. Measured on the CPU.

Run: python -m benchmarks start/model_sizes [16M|125M|0.5B|1B ...] [--runs N]
Time: 10 to 30 minutes for each size
Result: model-sizes-cpu.json
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import llama
from benchmarks.common import finish, load, parser
from benchmarks.start.cold_start import VLLM_ARGS
from coldstart.bench import result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench
from coldstart.models import inspection
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.validate.launchers import ModelUnderTest, coldstart_command, create_launchers
from coldstart.validate.responses import PROMPTS

RESULT = "model-sizes-cpu"
MODES = tuple(mode for mode in run_order.DEFAULT_MODES if mode != run_order.VLLM_COLD)
SIZES = ("16M", "125M", "0.5B", "1B")
# Enough to see that the modes answer alike; sixty-four tokens of eight prompts would take longer than a start at 1B.
SETTINGS = RunSettings(PROMPTS[:2], max_tokens=16, steady=False)
Row = dict[str, Any]


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


def measure(size: str, runs: int, place: Path, cache: Cache) -> Row:
    """Measure one size and return its row. Raises CalledProcessError if its bundle cannot be built."""
    model = place / size
    common = ("--cache-dir", str(cache.root), "--offline")
    weights = llama.build(size, model)
    command = [*coldstart_command(), "materialize", str(model), "--snapshot", *common, "--format", "json"]
    command += ["--", *VLLM_ARGS]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    launchers = create_launchers(
        ModelUnderTest(str(model), str(model), tuple(VLLM_ARGS), common), MODES, place
    )
    rounds = Bench(launchers, SETTINGS, place, lambda said: print(said, flush=True), measure_floor=False)
    document = result.build_document(rounds.measure(runs, 1), model="", vllm_args=VLLM_ARGS, command_line=())
    return {
        "parameters": weights // 2,  # in bfloat16, beside some kilobytes of headers
        "dtype": "bfloat16",
        "weights_bytes": weights,
        "materialize": {"stages": json.loads(built)["seconds"]},
        "disk_bytes": measure_disk(model, cache),
        **{name: document[name] for name in ("date", "machine", "versions", "tokens_identical", "failures")},
        "modes": {
            mode: {name: value for name, value in row.items() if name != "timeline"}
            for mode, row in document["modes"].items()
        },
    }


def measure_disk(model: Path, cache: Cache) -> dict[str, int]:
    """Return the bytes that lie on the disk for each mode, weights apart: the bundle, and what is unpacked of it or frozen."""
    bundle = inspection.look_up(str(model), VLLM_ARGS, cache=cache, offline=True).bundle
    assert bundle is not None
    base = sum(section.size for section in bundle.manifest.sections)
    if bundle.has_section("compile"):
        digest = bundle.find_readable_section("compile").digest
        base += measure_tree(cache.unpacked / digest.removeprefix("sha256:"))
    engine = runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest)
    return {
        **dict.fromkeys((run_order.FRESH, run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE), base),
        run_order.RUNTIME_SNAPSHOT: base + measure_tree(cache.runtimes),
        run_order.SNAPSHOT: base + measure_tree(engine),
    }


def measure_tree(place: Path) -> int:
    """Return the disk bytes of all files below `place`, without the holes of sparse files."""
    return sum(file.lstat().st_blocks * 512 for file in place.rglob("*") if not file.is_dir())


if __name__ == "__main__":
    main()
