"""What an engine process is asked to do with CUDA graphs and compiled code, by environment variables.

COLDSTART_GRAPHS_RECORD=<directory>   an offline round: this process leaves its layout there (rounds.py)
COLDSTART_GRAPHS_PROVE=<directory>    the last offline round: restore what was recorded there and compare
COLDSTART_GRAPHS_RESTORE=<directory>  a start from a proven bundle
COLDSTART_KV_NOTE=<directory>         an offline start: each worker leaves there what its profiling found
COLDSTART_KV_PLAN=<json>              KV-cache sizes by rank that vLLM's start-up plan is to apply (kv_plan.py)
COLDSTART_COMPILED=<directory>        vLLM's ahead-of-time artefacts, to be laid where the worker looks
"""

RECORD, PROVE, RESTORE = "COLDSTART_GRAPHS_RECORD", "COLDSTART_GRAPHS_PROVE", "COLDSTART_GRAPHS_RESTORE"
KV_NOTE, KV_PLAN = "COLDSTART_KV_NOTE", "COLDSTART_KV_PLAN"
KV_REPORT = "coldstart_kv_report"
"""The method that a worker has where a KV plan was asked for: why it was not applied, or None."""
COMPILED, COMPILE_REPORT = "COLDSTART_COMPILED", "coldstart_compile_report"
"""The method says how many artefacts vLLM loaded, and why others were compiled again."""
KERNELS = "COLDSTART_GRAPHS_KERNELS"
"""`reference`: binaries are named by library, build id and offset instead of being copied."""
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""
CANARY = "COLDSTART_GRAPHS_CANARY"
"""`0`: no graph is replayed on its stored input before the first answer; `all`: every one is."""
