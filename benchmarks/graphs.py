"""What can be shown about graph restoration without a GPU. Nothing printed here is a GPU time.

  random   10,000 random graphs: constants corrupted and pointers missed at a layout never seen (goal 0 and 0)
  models   10 decoder shapes x 35 batch sizes in the simulator: the offline phase's own rounds and a process that only
           restores, each with its own addresses; outputs and KV cache bitwise equal.
           `--run N` is the same at other addresses, and only counted (`runs` in the file)
  cost     Python's share of a restore over a fake libcuda: 14,000 nodes, 56,000 pointers
  altered  every byte of every table of a bundle changed in turn: refused by the seal
`--out FILE` puts each job that ran into FILE, with its own commit, date and command, and leaves the others there.
The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from coldstart.contract.graphs import EngineTask  # noqa: E402
from coldstart.graphs import combine, gate, live, offline, rounds, table_files  # noqa: E402
from coldstart.graphs.errors import AlteredTable, GraphError  # noqa: E402
from coldstart.graphs.inputs import InputLog  # noqa: E402
from coldstart.graphs.link import broken_assumptions  # noqa: E402
from coldstart.graphs.restore import Restorer  # noqa: E402
from coldstart.graphs.snapshot import load_snapshot  # noqa: E402
from tests.support.graphs import random_graphs as rg  # noqa: E402
from tests.support.graphs.compare import compare  # noqa: E402
from tests.support.graphs.model import SHAPES, Shape, SimModel  # noqa: E402


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, minimum, maximum, count, and every sample in order."""
    summary = {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "n": len(samples),
    }
    return summary | {"runs": [round(sample, 4) for sample in samples]}


# --- random graphs ---


def random_graphs(count: int) -> dict[str, Any]:
    """Judge `count` graphs; refused and ambiguous ones (captured at restore) are counted apart."""
    totals = dict.fromkeys(
        ("judged", "refused", "ambiguous", "corrupted", "missed", "pointers", "constants"), 0
    )
    seed = 0
    while totals["judged"] < count:
        _judge(rg.generate(seed), seed, totals)
        seed += 1
    return totals | {"generated": seed}


def _judge(program: rg.Program, seed: int, totals: dict[str, int]) -> None:
    a, b, third = (rg.place(program, seed * 3 + i) for i in (1, 2, 3))
    more = [rg.snapshot(program, rg.place(program, seed * 3 + (1 << 50) + i)) for i in (1, 2)]
    try:
        tables = combine.combine(rg.snapshot(program, a), rg.snapshot(program, b), more).tables
    except GraphError:
        totals["refused"] += 1
        return
    if not tables.keys:
        totals["refused"] += 1
        return
    if broken_assumptions(tables, rg.region_bases(program, tables.regions, third)):
        totals["ambiguous"] += 1
        return
    found = rg.judge(program, tables, third)
    kinds = [f.kind for _, fields in program.nodes for f in fields]
    totals["judged"] += 1
    totals["corrupted"] += found.corrupted
    totals["missed"] += found.missed
    totals["pointers"] += kinds.count("pointer")
    totals["constants"] += kinds.count("constant")


# --- models ---


def models(shapes: list[Shape], run: int = 0) -> dict[str, Any]:
    """One row per shape; each step is a process of its own. Another `run` has other addresses."""
    rows = []
    for number, shape in enumerate(shapes):
        with tempfile.TemporaryDirectory() as directory:
            rows.append(_life(shape, Path(directory), itertools.count(10_000 * run + 100 * number)))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {
        "models": rows,
        "all_equal": all(r["proven"] + r["dropped"] == r["graphs"] == r["equal"] for r in rows),
    }


def _life(shape: Shape, work: Path, seeds: Iterator[int]) -> dict[str, Any]:
    """The offline phase's own rounds, then a process that restores."""
    answers: list[dict[str, Any]] = []

    def launch(name: str, task: EngineTask) -> None:
        answers.append(_step("record" if task.record else "prove", shape, next(seeds), work))

    bundle = offline.make(work, launch)
    tables = table_files.load(bundle)
    first, other, *_ = map(load_snapshot, rounds.layouts(work))
    return {
        "model": shape.name, "layouts": len(rounds.layouts(work)), "proofs": sum("proven" in a for a in answers),
        "assumptions": len(tables.assumed), "classifiers": [asdict(score) for score in compare(first, other)],
        "graphs": len(shape.sizes), "nodes": len(tables.nodes), "relocations": len(tables.relocations),
        "bytes_per_node": round(tables.bytes_per_node(), 1), "contents_bytes": int(tables.contents.nbytes),
        "proven": len(tables.keys), "dropped": len(shape.sizes) - len(tables.keys),
        "reasons": sorted(set(tables.refused.values())),
    } | _step("serve", shape, next(seeds), work)  # fmt: skip


def counted(found: dict[str, Any]) -> dict[str, Any]:
    """What a run of `models` comes to: graphs, how many are proven and equal, and why the others were dropped."""
    rows = found["models"]
    names = ("graphs", "proven", "equal", "fallbacks", "launches_before_restored")
    sums = {name: sum(row[name] for row in rows) for name in names}
    dropped = {row["model"]: row["reasons"] for row in rows if row["dropped"]}
    return {name: value for name, value in found.items() if name != "models"} | sums | {"dropped": dropped}


def _step(step: str, shape: Shape, seed: int, directory: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "step", step, shape.name, str(seed), str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def step(name: str, shape: Shape, seed: int, work: Path) -> dict[str, Any]:
    """One process of the life of a bundle."""
    model = SimModel(shape, seed)
    if name == "serve":
        return _serve(model, work / rounds.BUNDLE)
    if name == "prove":
        proof = rounds.prove(work, model.driver, model, lambda restorer: model)
        return {"proven": len(proof.proven), "failed": len(proof.failed)}
    captured = {key: model.capture(key) for key in reversed(model.sizes())}
    watch = rounds.record(work, model.driver, model, captured, model, InputLog(model.driver), {})
    for number in range(live.LEAST):
        key = next(iter(captured))
        model.prepare(key, number)
        model.driver.launch(captured[key].executable, 0)
        watch.look()
    watch.save(work)
    return {}


def _serve(model: SimModel, bundle: Path) -> dict[str, Any]:
    """A process that restores and never ran the model, against its own ordinary capture afterwards."""
    restorer = Restorer(bundle, model.driver, model, adopt=gate.read_proof(bundle).adopt)
    restorer.link()
    graphs = {key: restorer.graph(key) for key in model.sizes()}
    forwards = model.driver.launches
    equal = sum(
        _outputs(model, g.executable, k) == _outputs(model, model.capture(k).executable, k)
        for k, g in graphs.items()
    )
    return {"equal": equal, "launches_before_restored": forwards, "fallbacks": len(restorer.fallbacks)}


def _outputs(model: SimModel, executable: int, key: str) -> bytes:
    model.prepare(key, 77)
    model.driver.launch(executable, 0)
    return model.observe(key)


# --- cost ---


def cost(rounds: int) -> dict[str, Any]:
    """Build the fake driver, then measure in a child that loads it."""
    from support.fake_cuda.build import build

    with tempfile.TemporaryDirectory() as directory:
        library = build(Path(directory))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
        command = [sys.executable, __file__, "cost-child", str(rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def cost_child(rounds: int) -> dict[str, Any]:
    """Over the fake driver; its own time is measured by the same calls without Python around them."""
    from graphs_cost import measure

    return measure(rounds, spread)


# --- altered ---


def altered() -> dict[str, Any]:
    """Every byte of every table and of the manifest, one at a time."""
    from support.graphs_tools import proven

    with tempfile.TemporaryDirectory() as directory:
        bundle = Path(directory) / "bundle"
        proven(bundle, Shape("tiny", 1, sizes=(1, 8)))
        counts = dict.fromkeys(("bytes", "refused", "accepted"), 0)
        for path in [*sorted(bundle.glob("*.npy")), bundle / table_files.MANIFEST]:
            _alter(path, bundle, counts)
        return counts


def _alter(path: Path, bundle: Path, counts: dict[str, int]) -> None:
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        counts["bytes"] += 1
        try:
            table_files.load(bundle)
            counts["accepted"] += 1
        except AlteredTable:
            counts["refused"] += 1
    path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["random", "models", "cost", "altered", "all", "step", "cost-child"])
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = _run(options)
    if options.out:
        held = json.loads(options.out.read_text()) if options.out.exists() else {}
        if "models" in result:
            runs = held.get("runs", {}) | {str(options.run): counted(result["models"])}
            result = (result if options.run == 0 else {}) | {"runs": runs}
        options.out.write_text(json.dumps(held | result, indent=1) + "\n")
    print(json.dumps(result))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.job == "step":
        name, shape, seed, directory = options.arguments
        return step(name, next(s for s in SHAPES if s.name == shape), int(seed), Path(directory))
    if options.job == "cost-child":
        return cost_child(int(options.arguments[0]))
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "random": lambda: random_graphs(options.count), "models": lambda: models(list(SHAPES), options.run),
        "cost": lambda: cost(options.rounds), "altered": altered,
    }  # fmt: skip
    chosen = list(jobs) if options.job == "all" else [options.job]
    out: dict[str, Any] = {"gpu": None, "note": "simulator and fake driver; no figure here is a GPU time"}
    for name in chosen:
        start = time.monotonic()
        out[name] = jobs[name]() | {"seconds": round(time.monotonic() - start, 1)} | _provenance(name)
    if options.run and "models" in out:
        out["models"]["command"] += f" --run {options.run}"
    return out


def _provenance(job: str) -> dict[str, Any]:
    """Where, when, of which sources, and how this was run."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = (
        os.environ.get("COMMIT") or subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    )
    return {
        "commit": commit.strip(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python benchmarks/graphs.py {job}",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
    }  # fmt: skip


if __name__ == "__main__":
    if shutil.which("cc") is None:
        print("no C compiler: `cost` cannot run", file=sys.stderr)
    main()
