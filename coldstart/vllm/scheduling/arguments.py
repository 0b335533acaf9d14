"""Arguments with which `vllm serve` runs our scheduler; imports neither vllm nor torch.

Invariant: vLLM's own flags express all settings, so a server started manually with them is the same server.
"""

from __future__ import annotations

import json
from typing import Any

from coldstart.scheduling.settings import DEADLINE, SchedulerSettings
from coldstart.vllm.scheduling import OFFLOADING_MODULE, OFFLOADING_SPEC, SCHEDULER_CLS


def serve_arguments(settings: SchedulerSettings, *, on_cpu: bool) -> list[str]:
    """Return the flags for the settings; without host_bytes, preempted KV is recomputed.

    On the CPU platform a KV connector makes vLLM reserve cores. Set VLLM_CPU_OMP_THREADS_BIND, for example to 0 on two cores,
    or every step takes twice as long.
    """
    stock = settings.policy == DEADLINE
    flags = ["--scheduling-policy", "priority"] if stock else ["--scheduler-cls", SCHEDULER_CLS]
    flags += ["--additional-config", json.dumps(settings.additional_config())]
    if stock and settings.batch is not None:
        flags += ["--max-num-active-seqs", str(settings.batch)]
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
    if on_cpu:
        extra |= {"spec_name": OFFLOADING_SPEC, "spec_module_path": OFFLOADING_MODULE}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
