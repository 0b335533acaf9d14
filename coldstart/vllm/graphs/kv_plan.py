"""KV cache size for vLLM's start-up plan, carried in the bundle (MEDUSA, section 6).

vLLM (>= 0.26) persists {schema, fingerprint, kv_cache_memory_bytes, free_memory_baseline} below its cache root and applies it
when the fingerprint matches and no less memory is free. This module adds three things. One plan per rank travels with the
bundle to machines with another model path (which vLLM's fingerprint contains). The plan records vLLM's version and the device.
What other processes hold is taken off its size before it is written where vLLM looks.

Plans are measured in a start with warm caches, because profiling counts the peak memory of a compilation as the model's. Both
values have a margin, because vLLM's check is strict and one refusal changes the size to which graphs are bound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.artifacts.files import replacing
from coldstart.graphs.errors import AlteredTableError, GraphRefusedError

SCHEMA = 1
VARIABLE = "VLLM_ENABLE_STARTUP_PLAN"
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

    def fit(self, free: int | None) -> KvPlan:
        """Return the plan less the memory that others hold now. If `free` is None, it is unknown, and the plan is unchanged.

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
        return msgspec.structs.replace(
            self,
            kv_cache_memory_bytes=size,
            free_memory_baseline=self.free_memory_baseline - missing,
        )


def path(cache_root: Path, fingerprint: str) -> Path:
    """Return the path at which vLLM looks for the plan."""
    return cache_root / "startup_plan" / f"startup_plan_{fingerprint}.json"


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


def write_for_worker(worker: Any, data: object) -> Path:
    """Write this rank's plan under the fingerprint that the worker computes, which includes the model's path.

    The bundle's key has already compared everything else. Raises GraphRefusedError if vLLM, device or free memory differ.
    """
    from vllm import __version__
    from vllm.platforms import current_platform
    from vllm.v1.worker import startup_plan

    plans, world = parse_plans(data), worker.parallel_config.world_size
    if len(plans) != world:
        raise GraphRefusedError(
            f"the bundle has KV plans for {len(plans)} ranks, but this engine has {world}"
        )
    plan = plans[worker.rank]
    here = (__version__, current_platform.get_device_name())
    if here != (plan.vllm, plan.device):
        raise GraphRefusedError(
            f"the KV plan was measured with {plan.vllm} on {plan.device}, but this engine has {' on '.join(here)}"
        )
    fingerprint = startup_plan.compute_plan_fingerprint(worker.vllm_config, worker.rank, world)
    target = Path(startup_plan._plan_path(fingerprint))
    return lay(plan, target.parents[1], fingerprint, free=worker.init_snapshot.free_memory)


def lay(plan: KvPlan, cache_root: Path, fingerprint: str, *, free: int | None = None) -> Path:
    """Write the plan atomically to the path that vLLM reads, reduced to the free memory.

    Raises GraphRefusedError (free memory) or OSError.
    """
    plan = plan.fit(free)
    target = path(cache_root, fingerprint)
    target.parent.mkdir(parents=True, exist_ok=True)
    figures = {name: getattr(plan, name) for name in ("kv_cache_memory_bytes", "free_memory_baseline")}
    with replacing(target, durable=False) as file:
        file.write(json.dumps({"schema": SCHEMA, "fingerprint": fingerprint} | figures).encode())
    return target
