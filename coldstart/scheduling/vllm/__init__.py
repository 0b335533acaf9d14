"""The policies on vLLM's V1 engine: `--scheduler-cls coldstart.scheduling.vllm.scheduler.PolicyScheduler`.

Invariant: vLLM's own schedule() makes every allocation; this package only decides what it gets to see.
"""

SCHEDULER_CLS = "coldstart.scheduling.vllm.scheduler.PolicyScheduler"
OFFLOADING_SPEC = "CpuPoolOffloadingSpec"
OFFLOADING_MODULE = "coldstart.scheduling.vllm.offload"
PINNING_POLICY = "PinnedLru"
PINNING_MODULE = "coldstart.scheduling.vllm.pinning"
