"""What an engine process is asked to do with CUDA graphs and compiled code, by environment variables (environment.py says what
each means).
"""

from coldstart.contract import environment

RECORD, PROVE, RESTORE = environment.GRAPHS_RECORD, environment.GRAPHS_PROVE, environment.GRAPHS_RESTORE
KV_NOTE, KV_PLAN = environment.KV_NOTE, environment.KV_PLAN
KERNELS = environment.GRAPHS_KERNELS
CANARY = environment.GRAPHS_CANARY
COMPILED = environment.COMPILED
COMPILE_REPORT = "coldstart_compile_report"
"""The method says how many artefacts vLLM loaded, and why others were compiled again."""
KV_REPORT = "coldstart_kv_report"
"""The method that a worker has where a KV plan was asked for: why it was not applied, or None."""
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""
