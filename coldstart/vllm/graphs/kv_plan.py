"""KV cache size of a GPU, carried in the bundle (MEDUSA, section 6).

vLLM's start-up plan sets the size instead of profiling the device, but from a file whose name depends on the model's path. Here
the size is set at the same place, from the bundle's plan of the rank, less what other processes hold now. The plan records the
version of vLLM and the device of the measurement.

Plans are measured in a start with warm caches, because profiling counts the peak memory of a compilation as the model's. Both
figures have a margin, because a refusal changes the size to which graphs are bound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.graphs.errors import AlteredTableError, GraphRefusedError

MARGIN = 256 << 20
# If other processes hold more than the rest of the planned size, vLLM's profiling decides whether the model fits at all.
LEAST = 0.25


Size = Annotated[int, msgspec.Meta(gt=0)]


class KvPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan of one rank, in bytes; `vllm` and `device` are the version and the device of the measurement."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    kv_cache_memory_bytes: Size
    free_memory_baseline: Size
    vllm: str
    device: str

    def fit(self, free: int | None) -> int:
        """Return the size less the memory that others hold now; the planned size if `free` is None, which means unknown.

        Raises:
            GraphRefusedError: Less than LEAST of the planned size would remain.
        """
        missing = 0 if free is None else max(0, self.free_memory_baseline - free)
        size = self.kv_cache_memory_bytes - missing
        if size < LEAST * self.kv_cache_memory_bytes:
            raise GraphRefusedError(
                f"rank {self.rank} has {free} bytes free, {missing} fewer than when the KV plan of "
                f"{self.kv_cache_memory_bytes} bytes was measured: vLLM profiles again"
            )
        return size


def note(directory: Path, worker: Any, kv_cache_memory_bytes: int) -> None:
    """Write the result of this worker's profiling, less the margin, for the process that started the engine."""
    from vllm import __version__
    from vllm.platforms import current_platform

    baseline = int(worker.init_snapshot.free_memory)
    figures = (int(kv_cache_memory_bytes) - MARGIN, baseline - MARGIN)
    plan = KvPlan(int(worker.rank), *figures, __version__, current_platform.get_device_name())
    (directory / f"rank-{plan.rank}.json").write_text(json.dumps(msgspec.to_builtins(plan)))


def collect(directory: Path) -> list[KvPlan]:
    """Read the plans that the workers of an offline start wrote, by rank. Raises AlteredTableError."""
    plans = [json.loads(file.read_text()) for file in directory.glob("rank-*.json")]
    return parse_plans(sorted(plans, key=lambda plan: int(plan["rank"])))


def parse_plans(data: object) -> list[KvPlan]:
    """Parse the plans of a kv section, one for each rank from 0. Raises AlteredTableError."""
    try:
        plans = msgspec.convert(data, list[KvPlan])
    except msgspec.ValidationError as error:
        raise AlteredTableError(f"invalid start-up plan in the kv section: {error}") from error
    if not plans or [plan.rank for plan in plans] != list(range(len(plans))):
        raise AlteredTableError("the kv section does not contain one start-up plan for each rank")
    return plans


def fit_worker(worker: Any, data: object) -> int:
    """Return the KV cache size of this worker's rank in bytes.

    The bundle's key has already compared everything else. Raises GraphError if the plan is invalid, or vLLM, device or free
    memory differ.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    plans, world = parse_plans(data), worker.parallel_config.world_size
    if len(plans) != world:
        raise GraphRefusedError(
            f"the bundle has KV plans for {len(plans)} ranks, but this engine has {world}"
        )
    plan: KvPlan = plans[worker.rank]
    here = (__version__, current_platform.get_device_name())
    if here != (plan.vllm, plan.device):
        raise GraphRefusedError(
            f"the KV plan was measured with {plan.vllm} on {plan.device}, but this engine has {' on '.join(here)}"
        )
    return int(plan.fit(worker.init_snapshot.free_memory))
