"""Growth of the start time with the model, for every start mode at four sizes.

Importing and forking cost the same for every model; the weights grow. `fresh, files cold` is `fresh` with the weight files
dropped from the page cache before each launch. The models are llamas of random weights, built on first use
and removed afterwards. Measured on the CPU.

Run: python -m benchmarks start/model_sizes [16M|125M|0.5B|1B ...] [--runs N]
Time: 10 to 30 minutes for each size
Result: model-sizes-cpu.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import Bundle

from benchmarks.common import finish, load, parser
from benchmarks.weights import checkpoint
from coldstart.bench import result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench
from coldstart.models import inspection
from coldstart.models.resolution import weight_files
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.validate.launch import Command, Launcher, RunFiles
from coldstart.validate.launchers import ServeLauncher, Subject, console, create_launchers
from coldstart.validate.prompts import PROMPTS

RESULT = "model-sizes-cpu"
VLLM_ARGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456")
COMMAND = "python -m benchmarks start/model_sizes"
MODES = tuple(mode for mode in run_order.MODES if mode != run_order.VLLM_COLD)
COLD_FILES = "fresh, files cold"
# Layers, hidden and inner size, heads, KV heads, vocabulary; every head has 64 dimensions.
SHAPES = {
    "16M": (8, 384, 1024, 6, 2, 4096),
    "125M": (16, 768, 2048, 12, 4, 16000),
    "0.5B": (24, 1280, 3456, 20, 4, 32000),
    "1B": (22, 2048, 5632, 32, 4, 32000),
}
FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
# Enough to see that the modes answer alike; sixty-four tokens of eight prompts would take longer than a start at 1B.
SETTINGS = RunSettings(PROMPTS[:2], max_tokens=16, steady=False)
Row = dict[str, Any]


@dataclass
class ColdFiles(ServeLauncher):
    """A start with the weights' files dropped from the page cache just before."""

    weights: Path = Path()

    def command(self, files: RunFiles) -> Command:
        checkpoint.evict(self.weights)
        return super().command(files)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SHAPES)}; default: all that are missing"
    )
    arguments.add_argument("--runs", type=int, default=3)
    options = arguments.parse_args()
    if unknown := set(options.sizes) - set(SHAPES):
        arguments.error(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    rows = (load(RESULT) or {"rows": {}})["rows"]
    for size in options.sizes or [size for size in SHAPES if size not in rows]:
        rows[size] = {"command": f"{COMMAND} {size} --runs {options.runs}", **measured(size, options.runs)}
        kept = {known: rows[known] for known in SHAPES if known in rows}
        finish(RESULT, {"command": COMMAND, "rows": kept})
    return 0


def measured(size: str, runs: int) -> Row:
    """Measure one size and return its row. Raises CalledProcessError if its bundle cannot be built."""
    model = checkpoint.built(config(size))
    try:
        with tempfile.TemporaryDirectory(prefix="sizes-") as place:
            return _row(model, runs, Path(place))
    finally:
        shutil.rmtree(model)
        shutil.rmtree(cache().root, ignore_errors=True)


def cache() -> Cache:
    """Return the cache of bundles and unpacked sections, which only this benchmark uses."""
    return Cache(checkpoint.home() / "sizes")


def config(size: str) -> Mapping[str, Any]:
    """The checkpoint's configuration, in the type that this processor computes in."""
    import torch

    dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    return {**checkpoint.CONFIG, **dict(zip(FIELDS, SHAPES[size], strict=True)), "torch_dtype": dtype}


def _row(model: Path, runs: int, place: Path) -> Row:
    built = materialized(model)
    subject = Subject(str(model), str(model), VLLM_ARGS, _common())
    document = bench(create_launchers(subject, MODES, place), runs, place)
    cold = ColdFiles(subject, run_order.FRESH, place / "run", weights=model)
    measured = {**document["modes"], COLD_FILES: bench([cold], runs, place)["modes"][run_order.FRESH]}
    return {
        "parameters": parameters(model),
        "dtype": json.loads((model / "config.json").read_text())["torch_dtype"],
        "weights_bytes": checkpoint.size(model),
        "materialize": built,
        "disk_bytes": disk(model),
        "modes": {
            mode: {k: v for k, v in held.items() if k != "timeline"} for mode, held in measured.items()
        },
        **{name: document[name] for name in ("date", "machine", "versions", "tokens_identical", "failures")},
    }


def parameters(model: Path) -> int:
    """Return the number of parameters of a checkpoint."""
    from safetensors import safe_open

    count = 0
    for path in weight_files(model):
        with safe_open(path, "pt") as file:
            names = file.keys()
            count += sum(prod(file.get_slice(name).get_shape()) for name in names)
    return count


def materialized(model: Path) -> Row:
    """Build the bundle with its snapshot; return the seconds by stage."""
    command = [*console(), "materialize", str(model), "--snapshot", *_common(), "--format", "json"]
    done = subprocess.run([*command, "--", *VLLM_ARGS], stdout=subprocess.PIPE, text=True, check=True)
    return {"stages": json.loads(done.stdout)["seconds"]}


def bench(modes: Sequence[Launcher], runs: int, place: Path) -> Row:
    """The bench's document of interleaved rounds, one uncounted start of each mode before them."""
    rounds = Bench(modes, SETTINGS, place, lambda said: print(said, flush=True), measure_floor=False)
    return result.document(rounds.measure(runs, 1), model="", vllm_args=VLLM_ARGS, command_line=())


def disk(model: Path) -> dict[str, int]:
    """Bytes that lie on the disk for each mode, weights apart: bundle, and what is unpacked of it, or the frozen runtime."""
    bundle = _bundle(model)
    base = sum(section.size for section in bundle.manifest.sections)
    if bundle.has("compile"):
        base += disk_usage(_unpacked(bundle, "compile"))
    return {
        **dict.fromkeys((run_order.FRESH, run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE), base),
        run_order.RUNTIME_SNAPSHOT: base + disk_usage(cache().runtimes),
        run_order.SNAPSHOT: base + disk_usage(runtime_image.engine_place(cache().runtimes, bundle.digest)),
    }


def _common() -> tuple[str, ...]:
    return ("--cache-dir", str(cache().root), "--offline")


def _bundle(model: Path) -> Bundle:
    found = inspection.look_up(str(model), VLLM_ARGS, cache=cache(), offline=True).bundle
    assert found is not None
    return found


def _unpacked(bundle: Bundle, section: str) -> Path:
    return cache().unpacked / bundle.entry(section).digest.removeprefix("sha256:")


def disk_usage(place: Path) -> int:
    """Return the disk bytes of all files below `place`, without the holes of sparse files."""
    return sum(file.lstat().st_blocks * 512 for file in place.rglob("*") if not file.is_dir())


if __name__ == "__main__":
    raise SystemExit(main())
