"""The `graphs` section: whether there are graphs here to materialize, and the engine processes that make it.

A model whose graphs cannot be restored is no failure: the rest of the bundle is as good as ever, and the reason is
kept in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError
from coldstart.graphs import offline
from coldstart.graphs.errors import GraphError
from coldstart.system import runtime

Kernels = Literal["value", "reference"]


def absent(vllm_args: Arguments) -> str | None:
    """Why an engine started so captures no CUDA graphs at all; None where it does."""
    if runtime.targets_cpu():
        return "the installed vLLM runs on the processor, which has no CUDA graphs: there are none to materialize"
    if vllm_args.value("enforce_eager") not in (None, False):
        return "--enforce-eager captures no CUDA graphs: there are none to materialize"
    if any(vllm_args.number(name, 1) > 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")):
        return "graphs of several ranks hold collectives, whose state no copy has: every start captures them"
    return None


def make(
    target: Path, work: Path, launch: offline.Launch, vllm_args: Arguments, kernels: Kernels = "value"
) -> str | None:
    """Write the section as the new directory `target`; None, or why there is no section."""
    if reason := absent(vllm_args):
        return reason
    work.mkdir()
    try:
        offline.make(work, launch, by_reference=kernels == "reference").rename(target)
    except (GraphError, CommandFailedError) as error:
        return f"every start captures its CUDA graphs itself: {error}"
    return None


def kv_args(sizing: Mapping[str, object], vllm_args: Arguments) -> list[str]:
    """One KV size for all recording processes: regions of different sizes are different regions."""
    if vllm_args.gives("kv_cache_memory_bytes"):
        return []
    plans = sizing.get("plans")
    # What a start from the bundle will have: vLLM's plan leaves another margin than its profiling.
    size = plans[0]["kv_cache_memory_bytes"] if isinstance(plans, list) and plans else sizing["bytes"]
    return ["--kv-cache-memory-bytes", str(size)]
