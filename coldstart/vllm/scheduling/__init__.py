"""Scheduling policies in vLLM's V1 engine, as classes for its `--scheduler-cls`.

Invariant: vLLM's own schedule() makes every allocation; this package only selects the requests that it sees.
"""

SCHEDULER_CLS = "coldstart.vllm.scheduling.scheduler.PolicyScheduler"
CONNECTOR, OFFLOADING_SPEC = "PolicyOffloadingConnector", "CpuPoolOffloadingSpec"
OFFLOADING_MODULE = "coldstart.vllm.scheduling.offload"
