"""What vLLM loads in each of its processes (`vllm.general_plugins`): a few look-ups, and the plug-in where asked for.

COLDSTART_GRAPHS_RECORD=<directory>   an offline round: this process leaves its layout there (rounds.py)
COLDSTART_GRAPHS_PROVE=<directory>    the last offline round: restore what was recorded there and compare
COLDSTART_GRAPHS_RESTORE=<directory>  a start from a proven bundle
COLDSTART_KV_PLAN=<json>              a KV-cache size that vLLM's start-up plan is to apply (vllm/kv_plan.py)
"""

from __future__ import annotations

import os

RECORD, PROVE, RESTORE = "COLDSTART_GRAPHS_RECORD", "COLDSTART_GRAPHS_PROVE", "COLDSTART_GRAPHS_RESTORE"
KV_PLAN = "COLDSTART_KV_PLAN"
KERNELS = "COLDSTART_GRAPHS_KERNELS"
"""`reference`: binaries are named by library, build id and offset instead of being copied."""
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""
CANARY = "COLDSTART_GRAPHS_CANARY"
"""`0`: no graph is replayed on its stored input before the first answer; `all`: every one is."""


def register() -> None:
    """Hook vLLM where one of the four is in the environment."""
    if any(os.environ.get(name) for name in (RECORD, PROVE, RESTORE, KV_PLAN)):
        from coldstart.graphs.vllm import plugin

        plugin.register()
