"""A process of benchmarks/gpu/engine.py whose engine is the simulated one: it follows the same protocol.

`FAIL` names the work that ends with an error (plain, record, prove, restore, import), `HANG` the work that never ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from support import graphs_engine
from support.graphs_processes import engine

from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan

KEYS = list(graphs_engine.SimModel(graphs_engine.SHAPE, 0).sizes())


def kind(task: EngineTask) -> str:
    return next((name for name in ("record", "prove", "restore") if getattr(task, name)), "plain")


def measure(task: EngineTask) -> dict[str, Any]:
    if kind(task) == "plain":
        graphs, fallbacks, seconds = {"restored": [], "captured": KEYS}, None, 4.0
    else:
        done = engine(task, os.getpid())
        graphs = {"restored": done.get("restored", []), "captured": []}
        fallbacks, seconds = [done.get("fallbacks")], 0.5
    answers = {"1": {"tokens": [[7, 8]], "logprobs": [[-1.0, -2.0]], "decode_ms": 3.0}}
    times = {"capture_s": seconds, "engine_s": seconds + 2, "link_s": 0.1}
    return {"times": times, "graphs": graphs, "fallbacks": fallbacks, "answers": answers}


def main(ready: Path) -> None:
    failing = os.environ.get("FAIL")
    part = ready.with_suffix(".part")
    part.write_text(json.dumps({"error": "no vLLM here"} if failing == "import" else {"import_s": 1.5}))
    part.rename(ready)
    instruction = json.loads(sys.stdin.readline())
    plan, result = LaunchPlan.parse_document(instruction["plan"]), Path(instruction["result"])
    if kind(plan.engine) == os.environ.get("HANG"):
        result.write_text(json.dumps({"times": {"config_s": 1.0}}))
        while True:
            time.sleep(1)
    if kind(plan.engine) == failing:
        result.write_text(json.dumps({"times": {}, "error": "RuntimeError: no device"}))
        sys.exit("RuntimeError: no device")
    result.write_text(json.dumps(measure(plan.engine) | {"done": True}))


if __name__ == "__main__":
    with contextlib.suppress(ValueError):
        main(Path(sys.argv[1]))
