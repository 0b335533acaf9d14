"""Entry point that vLLM loads in each of its processes (`vllm.general_plugins`): installs the plug-in if requested."""

from __future__ import annotations

from coldstart.contract.environment import PLAN


def register() -> None:
    """Hook vLLM if the launch plan requests it; without a plan, import and read nothing else."""
    if not PLAN.read():
        return
    from coldstart.contract.graphs import EngineTask
    from coldstart.contract.plan import LaunchPlan

    if (task := LaunchPlan.current().engine) != EngineTask():
        from coldstart.vllm.graphs import plugin

        plugin.register(task)
