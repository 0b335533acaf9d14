"""The policies on vLLM's V1 engine, as classes for its `--scheduler-cls`.

Invariant: vLLM's own schedule() makes every allocation; this package only decides what it gets to see.
"""

SCHEDULER_CLS = "coldstart.vllm.scheduling.scheduler.PolicyScheduler"
OFFLOADING_SPEC = "CpuPoolOffloadingSpec"
OFFLOADING_MODULE = "coldstart.vllm.scheduling.offload"
PINNING_POLICY = "PinnedLru"
PINNING_MODULE = "coldstart.vllm.scheduling.pinning"
WHOLE_CONNECTOR = "OffloadingConnector"
"""vLLM's own."""
TAILS_CONNECTOR = "TailsConnector"
TAILS_MODULE = "coldstart.vllm.scheduling.tails"
