"""Scheduling policies for vLLM's V1 engine (`--scheduler-cls`), and the vLLM arguments that enable them.

Invariants: vLLM's own schedule() allocates all memory; this package only selects the requests that it considers. All
settings are vLLM arguments, so a server that is started manually with these arguments behaves in the same way. This
module imports neither vllm nor torch.
"""

from __future__ import annotations

import json
from typing import Any

from coldstart.scheduling.settings import DEADLINE, FCFS, MLFQ, SchedulerSettings

SCHEDULER_CLS = "coldstart.vllm.scheduling.scheduler.PolicyScheduler"
KEEP_HEADERS = "coldstart.vllm.scheduling.headers.KeepHeaders"
CONNECTOR, OFFLOADING_SPEC = "PolicyOffloadingConnector", "CpuPoolOffloadingSpec"
OFFLOADING_MODULE = "coldstart.vllm.scheduling.offload"


def build_serve_arguments(settings: SchedulerSettings, *, on_cpu: bool) -> list[str]:
    """Return the vLLM arguments for the settings. Without host_bytes, the KV of preempted requests is recomputed.

    On the CPU, a KV connector makes vLLM reserve cores. Set VLLM_CPU_OMP_THREADS_BIND, for example to 0 on a machine with
    two cores; otherwise every step takes twice as long.
    """
    flags: list[str] = []
    if settings.policy == MLFQ:
        flags += ["--scheduler-cls", SCHEDULER_CLS]
        if settings.kv_strategy != "recompute" and settings.host_bytes:
            config = kv_transfer_config(settings.host_bytes, on_cpu=on_cpu)
            flags += ["--kv-transfer-config", json.dumps(config)]
    elif settings.batch is not None:
        flags += ["--max-num-active-seqs", str(settings.batch)]
    if settings.policy == DEADLINE:
        flags += ["--scheduling-policy", "priority"]
        flags += ["--middleware", KEEP_HEADERS] if settings.classes else []
    if settings.policy != FCFS:
        flags += ["--additional-config", json.dumps(settings.build_additional_config())]
    return flags


def kv_transfer_config(host_bytes: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return the --kv-transfer-config of the offloading connector, with offloading of decode KV enabled."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False}
    if on_cpu:
        extra |= {"spec_name": OFFLOADING_SPEC, "spec_module_path": OFFLOADING_MODULE}
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": OFFLOADING_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
