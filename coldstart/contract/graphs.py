"""What an engine process is asked to do with CUDA graphs, by environment variables.

COLDSTART_GRAPHS_RECORD=<directory>   an offline round: this process leaves its layout there (rounds.py)
COLDSTART_GRAPHS_PROVE=<directory>    the last offline round: restore what was recorded there and compare
COLDSTART_GRAPHS_RESTORE=<directory>  a start from a proven bundle
COLDSTART_KV_PLAN=<json>              a KV-cache size that vLLM's start-up plan is to apply (vllm/kv_plan.py)
"""

RECORD, PROVE, RESTORE = "COLDSTART_GRAPHS_RECORD", "COLDSTART_GRAPHS_PROVE", "COLDSTART_GRAPHS_RESTORE"
KV_PLAN = "COLDSTART_KV_PLAN"
KERNELS = "COLDSTART_GRAPHS_KERNELS"
"""`reference`: binaries are named by library, build id and offset instead of being copied."""
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""
CANARY = "COLDSTART_GRAPHS_CANARY"
"""`0`: no graph is replayed on its stored input before the first answer; `all`: every one is."""
