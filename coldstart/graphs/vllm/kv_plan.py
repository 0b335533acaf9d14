"""KV-cache sizing through vLLM's own start-up plan, carried in the bundle (section 6 of the paper).

vLLM (>= 0.26) persists {schema, fingerprint, kv_cache_memory_bytes, free_memory_baseline} below its cache
root and applies it when the fingerprint matches and no less memory is free.  What it lacks is added here: the
plan travels with the bundle, says where it came from, and is checked before it is laid where vLLM looks.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    def check_free(self, free: int) -> None:
        """Raise Refused when less memory is free than when the plan was measured."""
        if free < self.free_memory_baseline:
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


def to_json(plans: list[KvPlan]) -> list[dict[str, Any]]:
    """For the bundle's kv section."""
    return [asdict(plan) for plan in plans]


def lay(plan: KvPlan, cache_root: Path, *, free: int | None = None) -> Path:
    """Write the plan where vLLM looks, atomically. Raises Refused (free memory) or OSError."""
    if free is not None:
        plan.check_free(free)
    target = path(cache_root, plan.fingerprint)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = ("fingerprint", "kv_cache_memory_bytes", "free_memory_baseline")
    data = {"schema": SCHEMA} | {name: getattr(plan, name) for name in names}
    temporary = target.with_suffix(f".tmp.{os.getpid()}")
    temporary.write_text(json.dumps(data))
    temporary.replace(target)
    return target
