"""Growth of the start time with the model, for every start mode at four sizes.

Importing and forking cost the same for every model; the weights grow. `fresh, files cold` is `fresh` with the weight files
dropped from the page cache before each launch. The models are llamas of random weights, built on first use
and removed afterwards unless `--keep` is given. Measured on the CPU.

Run: python -m benchmarks start/model_sizes [16M|125M|0.5B|1B ...] [--runs N] [--keep]
Time: 10 to 30 minutes for each size
Result: model-sizes-cpu.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import Bundle

from benchmarks.common import RESULTS
from benchmarks.weights import checkpoint
from coldstart.bench import launchers, result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench
from coldstart.models import inspection
from coldstart.system.paths import Cache
from coldstart.validate.launch import Command, Launcher, RunFiles
from coldstart.validate.launchers import ServeLauncher, Subject, console
from coldstart.validate.prompts import PROMPTS

RESULT = RESULTS / "model-sizes-cpu.json"
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


@dataclass(frozen=True)
class ColdFiles(ServeLauncher):
    """A start with the weights' files dropped from the page cache just before."""

    weights: Path = Path()

    def command(self, files: RunFiles) -> Command:
        checkpoint.evict(self.weights)
        return super().command(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SHAPES)}; default: all that are missing"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="without vllm-warm, tokens are not compared",
    )
    parser.add_argument("--keep", action="store_true", help="leave model, bundle and caches where they are")
    options = parser.parse_args()
    if unknown := set(options.sizes) - set(SHAPES):
        parser.error(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for size in options.sizes or [size for size in SHAPES if size not in rows]:
        command = f"{COMMAND} {size} --runs {options.runs} --modes {' '.join(options.modes)}"
        row = measured(size, options.modes, options.runs, keep=options.keep)
        rows[size] = {"command": command, **row}
        kept = {known: rows[known] for known in SHAPES if known in rows}
        RESULT.write_text(json.dumps({"command": COMMAND, "rows": kept}, indent=1) + "\n")
    return 0


def measured(size: str, modes: Sequence[str], runs: int, *, keep: bool) -> Row:
    """The row of one size. Raises CalledProcessError where its bundle cannot be made."""
    model = checkpoint.built(config(size))
    try:
        with tempfile.TemporaryDirectory(prefix="sizes-") as place:
            return _row(model, modes, runs, Path(place))
    finally:
        if not keep:
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


def _row(model: Path, modes: Sequence[str], runs: int, place: Path) -> Row:
    made = materialized(model)
    subject = Subject(str(model), str(model), VLLM_ARGS, _common())
    document = bench(launchers.launchers(subject, modes, place), runs, place)
    cold = ColdFiles(subject, run_order.FRESH, place / "run", weights=model)
    measured = {**document["modes"], COLD_FILES: bench([cold], runs, place)["modes"][run_order.FRESH]}
    return {
        "parameters": parameters(model),
        "dtype": json.loads((model / "config.json").read_text())["torch_dtype"],
        "weights_bytes": checkpoint.size(model),
        "materialize": made,
        "disk_bytes": disk(model),
        "modes": {
            mode: {k: v for k, v in held.items() if k != "timeline"} for mode, held in measured.items()
        },
        **{name: document[name] for name in ("date", "machine", "versions", "tokens_identical", "failures")},
    }


def materialized(model: Path) -> Row:
    """Make the bundle with its snapshot; seconds in all, and by stage where it was made just now."""
    command = [*console(), "materialize", str(model), "--snapshot", *_common(), "--format", "json"]
    began_s = time.monotonic()
    done = subprocess.run([*command, "--", *VLLM_ARGS], stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    return {"seconds": time.monotonic() - began_s, "made": told["made"], "stages": told["seconds"]}


def bench(modes: Sequence[Launcher], runs: int, place: Path) -> Row:
    """The bench's document of interleaved rounds, one uncounted start of each mode before them."""
    rounds = Bench(modes, SETTINGS, place, lambda said: print(said, flush=True), measure_floor=False)
    return result.document(rounds.measure(runs, 1), model="", vllm_args=VLLM_ARGS, command_line=())


def disk(model: Path) -> dict[str, int]:
    """Bytes that lie on the disk for each mode, weights apart: bundle, and what is unpacked of it, or the frozen runtime."""
    bundle, snapshot = _bundle(model), _bundle(model).entry("snapshot").size
    base = sum(section.size for section in bundle.manifest.sections) - snapshot
    if bundle.has("compile"):
        base += disk_usage(_unpacked(bundle, "compile"))
    return {
        **dict.fromkeys((run_order.FRESH, run_order.TEMPLATE_RUNTIME, run_order.TEMPLATE_ENGINE), base),
        run_order.RUNTIME_SNAPSHOT: base + disk_usage(cache().runtimes),
        run_order.SNAPSHOT: base + snapshot + disk_usage(_unpacked(bundle, "snapshot")),
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


def parameters(model: Path) -> int:
    """Return the number of parameters of the checkpoint."""
    from math import prod

    document = json.loads((model / "config.json").read_text())
    return sum(prod(shape) for _, shape in checkpoint.shapes(document))


if __name__ == "__main__":
    raise SystemExit(main())
