"""Scheduling policies in vLLM's V1 engine, as classes for its `--scheduler-cls`, and the arguments with which it runs them.

Invariants: vLLM's own schedule() makes every allocation; this package only selects the requests that it sees. vLLM's own flags
express all settings, so a server started manually with them is the same server. This module imports neither vllm nor torch.
"""

from __future__ import annotations

import json
from typing import Any

from coldstart.scheduling.settings import DEADLINE, FCFS, MLFQ, SchedulerSettings

SCHEDULER_CLS = "coldstart.vllm.scheduling.scheduler.PolicyScheduler"
KEEP_HEADERS = "coldstart.vllm.scheduling.headers.KeepHeaders"
CONNECTOR, OFFLOADING_SPEC = "PolicyOffloadingConnector", "CpuPoolOffloadingSpec"
OFFLOADING_MODULE = "coldstart.vllm.scheduling.offload"


def serve_arguments(settings: SchedulerSettings, *, on_cpu: bool) -> list[str]:
    """Return the flags for the settings; without host_bytes, preempted KV is recomputed.

    On the CPU platform a KV connector makes vLLM reserve cores. Set VLLM_CPU_OMP_THREADS_BIND, for example to 0 on two cores,
    or every step takes twice as long.
    """
    evicts = settings.policy == MLFQ
    flags = ["--scheduler-cls", SCHEDULER_CLS] if evicts else []
    if settings.policy == DEADLINE:
        flags += ["--scheduling-policy", "priority"]
        flags += ["--middleware", KEEP_HEADERS] if settings.classes else []
    if settings.policy != FCFS or settings.shadow_s is not None:
        flags += ["--additional-config", json.dumps(settings.additional_config())]
    if not evicts and settings.batch is not None:
        flags += ["--max-num-active-seqs", str(settings.batch)]
    if settings.kv_strategy != "recompute" and settings.host_bytes:
        config = kv_transfer_config(settings.host_bytes, on_cpu=on_cpu, evicts=evicts)
        flags += ["--kv-transfer-config", json.dumps(config)]
    return flags


def kv_transfer_config(host_bytes: int, *, on_cpu: bool, evicts: bool) -> dict[str, Any]:
    """Return the settings of vLLM's offloading connector, which here also keeps decode KV (off by default).

    `evicts` is whether our scheduler evicts the requests, and not vLLM's.
    """
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False}
    if on_cpu:
        extra |= {"spec_name": OFFLOADING_SPEC, "spec_module_path": OFFLOADING_MODULE}
    ours = {"kv_connector": CONNECTOR, "kv_connector_module_path": OFFLOADING_MODULE}
    return {
        **(ours if evicts else {"kv_connector": "OffloadingConnector"}),
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
