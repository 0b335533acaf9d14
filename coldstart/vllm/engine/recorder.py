"""An engine that is started for the sake of what a plug-in does while it starts, and in its first few steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.system.proc.lifeline import die_as_a_group
from coldstart.vllm.engine.offline import OfflineEngine, begin

PROMPT_TOKENS, LIVE_STEPS = 8, 6


def run(plan: LaunchPlan) -> None:
    """Start the engine inside this process."""
    begin(plan)
    engine = OfflineEngine(plan.vllm_args)
    if plan.engine.record and engine.config.model_config.runner_type == "generate":
        engine.add(engine.prompt(PROMPT_TOKENS), LIVE_STEPS)
        engine.drain()


if __name__ == "__main__":
    die_as_a_group()
    run(LaunchPlan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.flush()
    # Nothing is left to do, and vLLM's teardown takes seconds.
    os._exit(0)
