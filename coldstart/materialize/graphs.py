"""Build the `graphs` section: recorded CUDA graphs, if the engine captures any.

If the graphs cannot be restored, the rest of the bundle is still valid, and the bundle records the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError
from coldstart.graphs import offline
from coldstart.graphs.errors import GraphError
from coldstart.system import runtime


def explain_no_graphs(vllm_args: Arguments) -> str | None:
    """Return the reason why an engine with these arguments has no CUDA graphs to record, or None if it has any."""
    if runtime.targets_cpu():
        return "the installed vLLM runs on the CPU, which has no CUDA graphs to materialize"
    if vllm_args.value("enforce_eager") not in (None, False):
        return "with --enforce-eager the engine captures no CUDA graphs to materialize"
    if any(vllm_args.number(name, 1) > 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")):
        return "graphs of several ranks contain collectives, whose state cannot be restored: every start captures them again"
    return None


def build_section(target: Path, work: Path, launch: offline.Launch, vllm_args: Arguments) -> str | None:
    """Write the `graphs` section to the new directory `target`. Return None, or the reason why there is no such section."""
    if reason := explain_no_graphs(vllm_args):
        return reason
    work.mkdir()
    try:
        offline.run_offline_phase(work, launch).rename(target)
    except (GraphError, CommandFailedError) as error:
        return f"every start captures its CUDA graphs: {error}"
    return None


def kv_cache_arguments(sizing: Mapping[str, object], vllm_args: Arguments) -> list[str]:
    """Return the vLLM arguments that give all recording processes the same KV cache size, or none if the user has set it.

    Memory regions of different sizes cannot be compared.
    """
    if vllm_args.gives("kv_cache_memory_bytes"):
        return []
    plans = sizing.get("plans")
    # This is the size in a start from the bundle, whose plan leaves a different margin than vLLM's profiling.
    size = plans[0]["kv_cache_memory_bytes"] if isinstance(plans, list) and plans else sizing["bytes"]
    return ["--kv-cache-memory-bytes", str(size)]
