"""KV of running requests, moved between vLLM servers. This module imports neither vllm nor torch."""

from __future__ import annotations

import json

CONNECTOR = "coldstart.vllm.handover.connector"


def handover_arguments(host: str, identity: str) -> list[str]:
    """Return the flags for a server whose data ports listen on the address `host`.

    `identity` names the weights: KV is exchanged between servers with equal identities only. The handover key is in the
    environment (HANDOVER_KEY), because command lines are visible to all users of a machine.
    """
    config = {
        "kv_connector": "KvHandoverConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": host, "identity": identity},
    }
    return ["--kv-transfer-config", json.dumps(config)]
