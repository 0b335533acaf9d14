"""What vLLM loads in each of its processes (`vllm.general_plugins`): two look-ups, and the plug-in where asked for."""

from __future__ import annotations

import os

RECORD, RESTORE = "COLDSTART_GRAPHS_RECORD", "COLDSTART_GRAPHS_RESTORE"


def register() -> None:
    """Hook vLLM's capture when a directory to record to or to restore from is named in the environment."""
    if os.environ.get(RECORD) or os.environ.get(RESTORE):
        from coldstart.graphs import vllm_plugin

        vllm_plugin.register()
