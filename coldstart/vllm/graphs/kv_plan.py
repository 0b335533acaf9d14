"""Set the KV cache size of a GPU engine from the bundle (MEDUSA, section 6).

vLLM's start-up plan can set the size instead of profiling the GPU, but its file name depends on the model path. So this
module sets the size from the bundle's plan for the rank, minus the memory that other processes use now. The plan records
the vLLM version and the GPU that it was measured with.

Plans are measured in a start with warm caches, because profiling would otherwise count the peak memory of a compilation.
The size and the free memory are reduced by a margin, because graphs depend on a size that fits each start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.graphs.errors import AlteredTableError, GraphRefusedError

MARGIN_BYTES = 256 << 20
# Minimum share of the planned size; below it, vLLM's profiling decides whether the model fits.
MIN_SHARE = 0.25


Size = Annotated[int, msgspec.Meta(gt=0)]


class KvSizePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV cache plan of one rank; sizes are in bytes. It was measured with vLLM version `vllm` on GPU `device`."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    kv_cache_memory_bytes: Size
    free_memory_baseline: Size
    vllm: str
    device: str

    def fit_to_memory(self, free_bytes: int) -> int:
        """Return the planned size minus the memory that other processes use now.

        Raises:
            GraphRefusedError: Less than MIN_SHARE of the planned size would remain.
        """
        missing = max(0, self.free_memory_baseline - free_bytes)
        size = self.kv_cache_memory_bytes - missing
        if size < MIN_SHARE * self.kv_cache_memory_bytes:
            raise GraphRefusedError(
                f"cannot use the KV plan of {self.kv_cache_memory_bytes} bytes on rank {self.rank}: {free_bytes} bytes are "
                f"free, {missing} fewer than when it was measured"
            )
        return size


def write_plan(directory: Path, worker: Any, kv_cache_memory_bytes: int) -> None:
    """Write the profiling result of this worker, minus the margin, for the process that started the engine."""
    from vllm import __version__
    from vllm.platforms import current_platform

    baseline = int(worker.init_snapshot.free_memory)
    figures = (int(kv_cache_memory_bytes) - MARGIN_BYTES, baseline - MARGIN_BYTES)
    plan = KvSizePlan(int(worker.rank), *figures, __version__, current_platform.get_device_name())
    (directory / f"rank-{plan.rank}.json").write_text(json.dumps(msgspec.to_builtins(plan)))


def read_plans(directory: Path) -> list[KvSizePlan]:
    """Read the plans written by the workers of an offline start, in order of rank. Raises AlteredTableError."""
    plans = [json.loads(file.read_text()) for file in directory.glob("rank-*.json")]
    return parse_plans(sorted(plans, key=lambda plan: int(plan["rank"])))


def parse_plans(data: object) -> list[KvSizePlan]:
    """Parse the plans in a bundle's kv section, one for each rank from 0. Raises AlteredTableError if they are invalid."""
    try:
        plans = msgspec.convert(data, list[KvSizePlan])
    except msgspec.ValidationError as error:
        raise AlteredTableError(f"invalid start-up plan in the kv section: {error}") from error
    if not plans or [plan.rank for plan in plans] != list(range(len(plans))):
        raise AlteredTableError("invalid kv section: it does not contain one start-up plan for each rank")
    return plans


def compute_kv_bytes(worker: Any, data: object) -> int:
    """Return the KV cache size of this worker's rank in bytes. The bundle's key already covers all other conditions.

    Raises:
        GraphError: The plan is invalid, or the vLLM version, the GPU or the free memory does not match.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    plans, world = parse_plans(data), worker.parallel_config.world_size
    if len(plans) != world:
        raise GraphRefusedError(
            f"the bundle has KV plans for {len(plans)} ranks, but this engine has {world}"
        )
    plan: KvSizePlan = plans[worker.rank]
    here = (__version__, current_platform.get_device_name())
    if here != (plan.vllm, plan.device):
        raise GraphRefusedError(
            f"the KV plan is of vLLM {plan.vllm} on {plan.device}, but this engine runs vLLM {' on '.join(here)}"
        )
    return int(plan.fit_to_memory(worker.init_snapshot.free_memory))
