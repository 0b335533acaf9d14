"""What to give `vllm serve` so that it runs our scheduler; imports neither vllm nor torch.

Invariant: everything is said by vLLM's own flags, so a server started by hand with them is the same server.
"""

from __future__ import annotations

import json
from typing import Any

from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling import (
    OFFLOADING_MODULE,
    OFFLOADING_SPEC,
    PINNING_MODULE,
    PINNING_POLICY,
    SCHEDULER_CLS,
    TAILS_CONNECTOR,
    TAILS_MODULE,
)


def serve_arguments(settings: SchedulerSettings, *, on_cpu: bool) -> list[str]:
    """Flags for the settings; without host_bytes no preempted KV is kept (recompute).

    On the CPU platform a KV connector makes vLLM reserve cores: set VLLM_CPU_OMP_THREADS_BIND, such as to
    0 on two cores, or every step takes twice as long.
    """
    flags = [
        "--scheduler-cls",
        SCHEDULER_CLS,
        "--additional-config",
        json.dumps(settings.additional_config()),
    ]
    if settings.kv_strategy != "recompute":
        flags += host_arguments(settings.host_bytes, on_cpu=on_cpu)
    return flags


def host_arguments(host_bytes: int | None, *, on_cpu: bool) -> list[str]:
    """Flags that keep preempted KV in so much host memory, whichever scheduler runs; none for none."""
    if not host_bytes:
        return []
    return ["--kv-transfer-config", json.dumps(kv_transfer_config(host_bytes, on_cpu=on_cpu))]


def kv_transfer_config(host_bytes: int, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's offloading connector, with the last blocks; decode KV is kept too, which is off by default there."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False}
    extra |= {"eviction_policy": PINNING_POLICY, "cache_policy_module_path": PINNING_MODULE}
    if on_cpu:
        extra |= {"spec_name": OFFLOADING_SPEC, "spec_module_path": OFFLOADING_MODULE}
    return {
        "kv_connector": TAILS_CONNECTOR,
        "kv_connector_module_path": TAILS_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
