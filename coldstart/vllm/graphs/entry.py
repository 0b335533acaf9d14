"""Entry point that vLLM loads in each of its processes (`vllm.general_plugins`), to add worker reports and graph hooks."""

from __future__ import annotations

from coldstart.contract.environment import PLAN


def register() -> None:
    """Install the hooks that the launch plan requires. Do nothing without a launch plan."""
    if not PLAN.read():
        return
    from coldstart.contract.graphs import WORKER_REPORT, EngineTask
    from coldstart.contract.plan import LaunchPlan
    from coldstart.vllm import compat, late

    compat.note_import()
    late.run_when_imported(
        "vllm.v1.worker.gpu_worker",  # the CPU worker is a subclass
        lambda module: setattr(module.Worker, WORKER_REPORT, lambda self: compat.build_worker_report()),
    )
    if (task := LaunchPlan.current().engine) != EngineTask():
        from coldstart.vllm.graphs import plugin

        plugin.register(task)
