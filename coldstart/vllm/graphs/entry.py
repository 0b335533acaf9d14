"""What vLLM loads in each of its processes (`vllm.general_plugins`): a few look-ups, and the plug-in where asked for."""

from __future__ import annotations

from coldstart.contract.environment import PLAN


def register() -> None:
    """Hook vLLM where the launch plan asks for it; in a vLLM that has none, nothing is read or imported."""
    if not PLAN.read():
        return
    from coldstart.contract.graphs import EngineTask
    from coldstart.contract.plan import LaunchPlan

    if (task := LaunchPlan.current().engine) != EngineTask():
        from coldstart.vllm.graphs import plugin

        plugin.register(task)
