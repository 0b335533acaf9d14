"""Growth of the start time with the model, for every start mode at four sizes.

Importing and forking cost the same for every model; the weights grow. `fresh, files cold` is `fresh` with the weight files
dropped from the page cache before each launch. The models are llamas of random weights in bfloat16, built on first use
and removed afterwards. Measured on the CPU.

Run: python -m benchmarks start/model_sizes [16M|125M|0.5B|1B ...] [--runs N]
Time: 10 to 30 minutes for each size
Result: model-sizes-cpu.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import llama
from benchmarks.common import finish, load, parser
from coldstart.bench import result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench
from coldstart.models import inspection
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.validate.launch import Command, Launcher, RunFiles
from coldstart.validate.launchers import ModelUnderTest, ServeLauncher, coldstart_command, create_launchers
from coldstart.validate.responses import PROMPTS

RESULT = "model-sizes-cpu"
VLLM_ARGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456")
MODES = tuple(mode for mode in run_order.DEFAULT_MODES if mode != run_order.VLLM_COLD)
COLD_FILES = "fresh, files cold"
SIZES = ("16M", "125M", "0.5B", "1B")
# Enough to see that the modes answer alike; sixty-four tokens of eight prompts would take longer than a start at 1B.
SETTINGS = RunSettings(PROMPTS[:2], max_tokens=16, steady=False)
Row = dict[str, Any]


@dataclass
class ColdFiles(ServeLauncher):
    """A start with the weights' files dropped from the page cache just before."""

    def command(self, files: RunFiles) -> Command:
        for path in Path(self.subject.target).glob("*.safetensors"):
            evict(path)
        return super().command(files)


def evict(path: Path) -> None:
    """Drop a file from the page cache. Raises RuntimeError if its first page remains, because a process has mapped it."""
    with path.open("rb") as opened:
        for _ in range(5):  # the kernel retains a few pages now and then
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                return
    raise RuntimeError(f"{path} remains in the page cache: another process has mapped it")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SIZES)}; default: all that are missing"
    )
    arguments.add_argument("--runs", type=int, default=3)
    options = arguments.parse_args()
    if unknown := set(options.sizes) - set(SIZES):
        arguments.error(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    rows = (load(RESULT) or {"rows": {}})["rows"]
    for size in options.sizes or [size for size in SIZES if size not in rows]:
        with tempfile.TemporaryDirectory(prefix="sizes-") as place:
            rows[size] = measured(size, options.runs, Path(place))
        finish(RESULT, {"rows": {known: rows[known] for known in SIZES if known in rows}})


def measured(size: str, runs: int, place: Path) -> Row:
    """Measure one size and return its row. Raises CalledProcessError if its bundle cannot be built."""
    model, cache = place / size, Cache(Cache.at().root / "sizes-benchmark")
    common = ("--cache-dir", str(cache.root), "--offline")
    subject = ModelUnderTest(str(model), str(model), VLLM_ARGS, common)
    try:
        weights = llama.build(size, model)
        options = ("--snapshot", *common, "--format", "json", "--", *VLLM_ARGS)
        command = [*coldstart_command(), "materialize", str(model), *options]
        built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        document = bench(create_launchers(subject, MODES, place), runs, place)
        cold = bench([ColdFiles(subject, run_order.FRESH, place / "run")], runs, place)
        modes = {**document["modes"], COLD_FILES: cold["modes"][run_order.FRESH]}
        for found in modes.values():
            found.pop("timeline", None)
        return {
            "parameters": weights // 2,  # in bfloat16, beside some kilobytes of headers
            "dtype": "bfloat16",
            "weights_bytes": weights,
            "materialize": {"stages": json.loads(built)["seconds"]},
            "disk_bytes": disk(model, cache),
            "modes": modes,
            **{
                name: document[name]
                for name in ("date", "machine", "versions", "tokens_identical", "failures")
            },
        }
    finally:
        shutil.rmtree(cache.root, ignore_errors=True)


def bench(modes: Sequence[Launcher], runs: int, place: Path) -> Row:
    """Return the bench's document of interleaved rounds, one uncounted start of each mode before them."""
    rounds = Bench(modes, SETTINGS, place, lambda said: print(said, flush=True), measure_floor=False)
    return result.build_document(rounds.measure(runs, 1), model="", vllm_args=VLLM_ARGS, command_line=())


def disk(model: Path, cache: Cache) -> dict[str, int]:
    """Bytes that lie on the disk for each mode, weights apart: bundle, and what is unpacked of it, or the frozen runtime."""
    bundle = inspection.look_up(str(model), VLLM_ARGS, cache=cache, offline=True).bundle
    assert bundle is not None
    base = sum(section.size for section in bundle.manifest.sections)
    if bundle.has_section("compile"):
        base += disk_usage(
            cache.unpacked / bundle.find_readable_section("compile").digest.removeprefix("sha256:")
        )
    return {
        **dict.fromkeys((run_order.FRESH, run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE), base),
        run_order.RUNTIME_SNAPSHOT: base + disk_usage(cache.runtimes),
        run_order.SNAPSHOT: base
        + disk_usage(runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest)),
    }


def disk_usage(place: Path) -> int:
    """Return the disk bytes of all files below `place`, without the holes of sparse files."""
    return sum(file.lstat().st_blocks * 512 for file in place.rglob("*") if not file.is_dir())


if __name__ == "__main__":
    main()
