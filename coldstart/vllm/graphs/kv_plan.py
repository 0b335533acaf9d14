"""KV-cache sizing through vLLM's own start-up plan, carried in the bundle (section 6 of the paper).

vLLM (>= 0.26) persists {schema, fingerprint, kv_cache_memory_bytes, free_memory_baseline} below its cache
root and applies it when the fingerprint matches and no less memory is free.  What it lacks is added here: the
plan travels with the bundle to machines where the model lies at another path (which vLLM's fingerprint names),
says with what it was measured, and is checked against the memory that is free before it is laid where vLLM looks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstart.artifacts.files import replacing
from coldstart.graphs.errors import AlteredTable, Refused

SCHEMA = 1
VARIABLE = "VLLM_ENABLE_STARTUP_PLAN"


@dataclass(frozen=True)
class KvPlan:
    """Bytes throughout; `vllm` and `device` say what the figure was measured with."""

    fingerprint: str
    kv_cache_memory_bytes: int
    free_memory_baseline: int
    vllm: str
    device: str

    def check_free(self, free: int | None) -> None:
        """Raise Refused when less memory is free than when the plan was measured; None is not known here."""
        if free is not None and free < self.free_memory_baseline:
            raise Refused(
                f"{free} bytes are free and the KV plan was measured with {self.free_memory_baseline}: "
                "vLLM profiles again"
            )


def path(cache_root: Path, fingerprint: str) -> Path:
    """Where vLLM looks."""
    return cache_root / "startup_plan" / f"startup_plan_{fingerprint}.json"


def collect(cache_root: Path, vllm: str, device: str) -> list[KvPlan]:
    """Plans that vLLM wrote during the offline run, one a rank."""
    plans = []
    for file in sorted((cache_root / "startup_plan").glob("startup_plan_*.json")):
        data = _read(file.read_text(), file.name)
        plans.append(
            KvPlan(
                data["fingerprint"], data["kv_cache_memory_bytes"], data["free_memory_baseline"], vllm, device
            )
        )
    return plans


def _read(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
        sizes = [data[n] for n in ("kv_cache_memory_bytes", "free_memory_baseline")]
        good = data["schema"] == SCHEMA and isinstance(data["fingerprint"], str)
    except (ValueError, KeyError, TypeError) as error:
        raise AlteredTable(f"{name} is no start-up plan: {error}") from error
    if not good or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise AlteredTable(f"{name} is no start-up plan of schema {SCHEMA}")
    result: dict[str, Any] = data
    return result


def of(data: object) -> KvPlan:
    """The plan of a kv section. Raises AlteredTable."""
    try:
        plan = KvPlan(**data)  # type: ignore[arg-type]
    except TypeError as error:
        raise AlteredTable(f"the kv section holds no start-up plan: {error}") from error
    texts = (plan.fingerprint, plan.vllm, plan.device)
    sizes = (plan.kv_cache_memory_bytes, plan.free_memory_baseline)
    if not all(isinstance(t, str) for t in texts) or not all(type(n) is int and n > 0 for n in sizes):
        raise AlteredTable("the kv section holds no start-up plan")
    return plan


def lay_for(worker: Any, data: object) -> Path:
    """Lay the plan under the fingerprint that this worker computes: vLLM's own names the model's path, and the
    bundle's key has already compared all else. Raises Refused where vLLM, device or free memory differ.
    """
    from vllm import __version__
    from vllm.platforms import current_platform
    from vllm.v1.worker import startup_plan

    plan = of(data)
    here = (__version__, current_platform.get_device_name())
    if here != (plan.vllm, plan.device):
        raise Refused(
            f"the KV plan was measured with {plan.vllm} on {plan.device}, here is {' on '.join(here)}"
        )
    world = worker.parallel_config.world_size
    fingerprint = startup_plan.compute_plan_fingerprint(worker.vllm_config, worker.rank, world)
    target = Path(startup_plan._plan_path(fingerprint))
    return lay(
        replace(plan, fingerprint=fingerprint), target.parents[1], free=worker.init_snapshot.free_memory
    )


def lay(plan: KvPlan, cache_root: Path, *, free: int | None = None) -> Path:
    """Write the plan where vLLM looks, atomically. Raises Refused (free memory) or OSError."""
    plan.check_free(free)
    target = path(cache_root, plan.fingerprint)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = ("fingerprint", "kv_cache_memory_bytes", "free_memory_baseline")
    data = {"schema": SCHEMA} | {name: getattr(plan, name) for name in names}
    with replacing(target, durable=False) as file:
        file.write(json.dumps(data).encode())
    return target
