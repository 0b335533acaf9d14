"""What vLLM loads in each of its processes (`vllm.general_plugins`): a few look-ups, and the plug-in where asked for."""

from __future__ import annotations

import os

from coldstart.contract.graphs import COMPILED, KV_NOTE, KV_PLAN, PROVE, RECORD, RESTORE


def register() -> None:
    """Hook vLLM where one of the six is in the environment."""
    if any(os.environ.get(name) for name in (RECORD, PROVE, RESTORE, KV_NOTE, KV_PLAN, COMPILED)):
        from coldstart.vllm.graphs import plugin

        plugin.register()
