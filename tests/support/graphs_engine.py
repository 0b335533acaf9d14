"""An engine process over the simulator: it reads the launch plan and does what a vLLM worker would do.

Every process draws its addresses and handles from the seed that it is given, so no two have a layout in common.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coldstart.contract.graphs import CANARY
from coldstart.contract.plan import LaunchPlan
from coldstart.graphs import offline
from coldstart.graphs.errors import GraphError
from coldstart.graphs.inputs import ENTRY, InputLog, Inputs, open_inputs
from coldstart.graphs.prove import read_proof, restore_proven
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import SymbolRegion
from tests.support.graphs.decoder import VOCABULARY
from tests.support.graphs.model import Shape, SimModel

SHAPE = Shape("engine", 2, sizes=(1, 8, 64, 256))
INPUTS = ("static:ids", "static:positions", "static:slots", "static:lengths")
SEED, STEPS, MOVING = "SIM_SEED", "SIM_STEPS", "SIM_MOVING"


def regions(model: SimModel, *symbols: str) -> list[SymbolRegion]:
    return [model.named[symbol] for symbol in symbols]


def inputs(model: SimModel, log: InputLog) -> Inputs:
    rows = 4 * model.shape.width
    outputs = {k: [("static:out", 0, model.shape.rows(n) * rows)] for k, n in model.sizes().items()}
    kv = [symbol for symbol in model.named if symbol.startswith("kv:")]
    return Inputs({"static:ids": (4, VOCABULARY)}, kv, log.static, outputs)


def record(model: SimModel, work: Path) -> dict[str, Any]:
    log, captured = InputLog(model.driver), {}
    for key in reversed(model.sizes()):
        model.prepare(key, 40)
        captured[key] = model.capture(key)
        log.remember(key, regions(model, *INPUTS))
    report = {ENTRY: asdict(inputs(model, log))}
    made = offline.record(work, model.driver, model, captured, log, report)
    for step in range(int(os.environ.get(STEPS, "3"))):
        _live(model, captured, made, step)
    return {"bases": sorted(hex(r.base) for r in model.regions())}


def _live(model: SimModel, captured: dict[str, Any], made: offline.ContentWatch, step: int) -> None:
    """Run one engine step; with MOVING first rewrite memory that no tensor names: the table or the semaphore."""
    model.prepare("decode:8", step)
    moving = {"table": model.rope_table, "semaphore": model.hidden.get("semaphore")}.get(
        os.environ.get(MOVING, "")
    )
    if moving:
        (held,) = model.driver.read(moving, 1)
        model.driver.write(moving, bytes([held ^ (1 + step)]))
    model.driver.launch(captured["decode:8"].executable, 0)
    made.look()


def prove(model: SimModel, work: Path) -> dict[str, Any]:
    restorer = Restorer(work / offline.BUNDLE, model.driver, model)
    made = offline.prove_bundle(restorer, open_inputs(restorer))
    return {"proven": made.proven, "failed": made.failed}


def restore(model: SimModel, directory: Path) -> dict[str, Any]:
    """Restore all graphs, then compare every graph with an ordinary capture."""
    proof = read_proof(directory)
    restorer = Restorer(directory, model.driver, model)
    every = CANARY.read() == "all"
    graphs = restore_proven(restorer, proof, open_inputs(restorer), every=every)
    launches = model.driver.launches
    equal = {key: _outputs(model, g.executable, key) == _outputs(model, model.capture(key).executable, key)
             for key, g in graphs.items()}  # fmt: skip
    return {
        "launches_before_ready": launches, "fallbacks": restorer.fallbacks, "restored": list(graphs), "equal": equal,
    }  # fmt: skip


def _outputs(model: SimModel, executable: int, key: str) -> bytes:
    model.prepare(key, 9)
    model.driver.launch(executable, 0)
    return model.observe(key)


def main() -> None:
    task = LaunchPlan.current().engine
    model = SimModel(SHAPE, int(os.environ[SEED]))
    jobs = [(record, task.record), (prove, task.prove), (restore, task.restore)]
    job, directory = next((job, directory) for job, directory in jobs if directory)
    try:
        print(json.dumps(job(model, directory)))
    except GraphError as error:
        if job is restore:
            raise
        offline.fail(directory, str(error))
        print(json.dumps({"error": str(error)}), file=sys.stderr)


if __name__ == "__main__":
    main()
