"""Start an engine only for the work of a plug-in, during the start and in the first few steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.system.proc.lifeline import die_as_a_group
from coldstart.vllm.engine.offline import OfflineEngine, begin

PROMPT_TOKENS, LIVE_STEPS = 8, 6


def run(plan: LaunchPlan) -> None:
    """Start the engine inside this process, and run a few steps if graphs are recorded."""
    begin(plan)
    engine = OfflineEngine(plan.vllm_args)
    if plan.engine.record and engine.config.model_config.runner_type == "generate":
        engine.add(engine.prompt(PROMPT_TOKENS), LIVE_STEPS)
        engine.drain()


if __name__ == "__main__":
    die_as_a_group()
    run(LaunchPlan.parse(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.flush()
    # No work is left, and vLLM's teardown takes seconds.
    os._exit(0)
