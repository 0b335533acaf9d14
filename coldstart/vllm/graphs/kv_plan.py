"""KV-cache sizing through vLLM's own start-up plan, carried in the bundle (section 6 of the paper).

vLLM (>= 0.26) persists {schema, fingerprint, kv_cache_memory_bytes, free_memory_baseline} below its cache
root and applies it when the fingerprint matches and no less memory is free.  What it lacks is added here: one plan a
rank travels with the bundle to machines where the model lies at another path (which vLLM's fingerprint names), says
with what it was measured, and is checked against the memory that is free before it is laid where vLLM looks.

Measured in a start with warm caches, since profiling charges the peak of a compilation to the model; and with a margin
in both figures, since vLLM's gate is a strict comparison and one refusal changes the size that graphs are bound to.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coldstart.artifacts.files import replacing
from coldstart.graphs.errors import AlteredTableError, GraphRefusedError

SCHEMA = 1
VARIABLE = "VLLM_ENABLE_STARTUP_PLAN"
MARGIN = 256 << 20


@dataclass(frozen=True)
class KvPlan:
    """One rank's. Bytes throughout; `vllm` and `device` say what the figure was measured with."""

    rank: int
    kv_cache_memory_bytes: int
    free_memory_baseline: int
    vllm: str
    device: str

    def check_free(self, free: int | None) -> None:
        """Raise Refused when less memory is free than when the plan was measured; None is not known here."""
        if free is not None and free < self.free_memory_baseline:
            raise GraphRefusedError(
                f"{free} bytes are free to rank {self.rank} and the KV plan was measured with "
                f"{self.free_memory_baseline}: vLLM profiles again"
            )


def path(cache_root: Path, fingerprint: str) -> Path:
    """Where vLLM looks."""
    return cache_root / "startup_plan" / f"startup_plan_{fingerprint}.json"


def note(directory: Path, worker: Any, kv_cache_memory_bytes: int) -> None:
    """Leave what this worker's profiling has found, less the margin, for whoever started the engine."""
    from vllm import __version__
    from vllm.platforms import current_platform

    baseline = int(worker.init_snapshot.free_memory)
    figures = (int(kv_cache_memory_bytes) - MARGIN, baseline - MARGIN)
    plan = KvPlan(int(worker.rank), *figures, __version__, current_platform.get_device_name())
    (directory / f"rank-{plan.rank}.json").write_text(json.dumps(asdict(plan)))


def collect(directory: Path) -> list[KvPlan]:
    """What the workers of an offline start have left, by rank. Raises AlteredTableError."""
    plans = [parse_plan(json.loads(file.read_text())) for file in directory.glob("rank-*.json")]
    return sorted(plans, key=lambda plan: plan.rank)


def parse_plan(data: object) -> KvPlan:
    """The plan of a kv section. Raises AlteredTableError."""
    try:
        plan = KvPlan(**data)  # type: ignore[arg-type]
    except TypeError as error:
        raise AlteredTableError(f"the kv section holds no start-up plan: {error}") from error
    sizes = (plan.kv_cache_memory_bytes, plan.free_memory_baseline)
    good = type(plan.rank) is int and plan.rank >= 0 and all(type(n) is int and n > 0 for n in sizes)
    if not good or not all(isinstance(t, str) for t in (plan.vllm, plan.device)):
        raise AlteredTableError("the kv section holds no start-up plan")
    return plan


def all_of(data: object) -> list[KvPlan]:
    """The plans of a kv section, one for each rank from 0. Raises AlteredTableError."""
    plans = [parse_plan(one) for one in data] if isinstance(data, list) else []
    if not plans or [plan.rank for plan in plans] != list(range(len(plans))):
        raise AlteredTableError("the kv section does not hold one start-up plan for each rank")
    return plans


def lay_for(worker: Any, data: object) -> Path:
    """Lay this rank's plan under the fingerprint that the worker computes: vLLM's own names the model's path, and the
    bundle's key has already compared all else. Raises Refused where vLLM, device or free memory differ.
    """
    from vllm import __version__
    from vllm.platforms import current_platform
    from vllm.v1.worker import startup_plan

    plans, world = all_of(data), worker.parallel_config.world_size
    if len(plans) != world:
        raise GraphRefusedError(f"the bundle has KV plans of {len(plans)} ranks, here are {world}")
    plan = plans[worker.rank]
    here = (__version__, current_platform.get_device_name())
    if here != (plan.vllm, plan.device):
        raise GraphRefusedError(
            f"the KV plan was measured with {plan.vllm} on {plan.device}, here is {' on '.join(here)}"
        )
    fingerprint = startup_plan.compute_plan_fingerprint(worker.vllm_config, worker.rank, world)
    target = Path(startup_plan._plan_path(fingerprint))
    return lay(plan, target.parents[1], fingerprint, free=worker.init_snapshot.free_memory)


def lay(plan: KvPlan, cache_root: Path, fingerprint: str, *, free: int | None = None) -> Path:
    """Write the plan where vLLM looks, atomically. Raises Refused (free memory) or OSError."""
    plan.check_free(free)
    target = path(cache_root, fingerprint)
    target.parent.mkdir(parents=True, exist_ok=True)
    figures = {name: getattr(plan, name) for name in ("kv_cache_memory_bytes", "free_memory_baseline")}
    with replacing(target, durable=False) as file:
        file.write(json.dumps({"schema": SCHEMA, "fingerprint": fingerprint} | figures).encode())
    return target
