"""Arguments with which `vllm serve` runs our scheduler; imports neither vllm nor torch.

Invariant: vLLM's own flags express all settings, so a server started manually with them is the same server.
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
)


def serve_arguments(settings: SchedulerSettings, *, on_cpu: bool) -> list[str]:
    """Return the flags for the settings; without host_bytes, preempted KV is recomputed.

    On the CPU platform a KV connector makes vLLM reserve cores. Set VLLM_CPU_OMP_THREADS_BIND, for example to 0 on two cores,
    or every step takes twice as long.
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
    """Return the flags that keep preempted KV in `host_bytes` of host memory, for any scheduler; none without memory."""
    if not host_bytes:
        return []
    return ["--kv-transfer-config", json.dumps(kv_transfer_config(host_bytes, on_cpu=on_cpu))]


def kv_transfer_config(host_bytes: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return the settings of vLLM's offloading connector, which here also keeps decode KV (off by default)."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False}
    extra |= {"eviction_policy": PINNING_POLICY, "cache_policy_module_path": PINNING_MODULE}
    if on_cpu:
        extra |= {"spec_name": OFFLOADING_SPEC, "spec_module_path": OFFLOADING_MODULE}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
