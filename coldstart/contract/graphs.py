"""What an engine process is asked to do with CUDA graphs, by environment variables (environment.py says what each means)."""

from coldstart.contract import environment

RECORD, PROVE, RESTORE = environment.GRAPHS_RECORD, environment.GRAPHS_PROVE, environment.GRAPHS_RESTORE
KV_PLAN = environment.KV_PLAN
KERNELS = environment.GRAPHS_KERNELS
CANARY = environment.GRAPHS_CANARY
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""
