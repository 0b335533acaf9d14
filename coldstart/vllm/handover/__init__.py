"""Arguments that let vLLM servers move running requests together with their KV cache.

This module imports neither vllm nor torch.
"""

from __future__ import annotations

import json

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments

CONNECTOR = "coldstart.vllm.handover.connector"
# Arguments that do not work with the connector or that select another one. A file of options that is missing can contain them.
_UNSUPPORTED = (
    "kv_transfer_config", "kv_offloading_size", "ec_transfer_config", "config",
    "enable_sleep_mode", "prefix_match_unit", "speculative_config", "use_replayssm",
)  # fmt: skip


def can_hand_over(given: Arguments) -> bool:
    """Return whether a server with these arguments can move requests with their KV."""
    # vLLM refuses connectors with this allocator, because it can move memory that others have registered.
    if "expandable_segments:True" in environment.PYTORCH_CUDA_ALLOC_CONF.read():
        return False
    parallel = max(given.get_integer(name, 1) for name in ("tensor_parallel_size", "data_parallel_size"))
    return parallel == 1 and not any(map(given.contains_flag, _UNSUPPORTED))


def handover_arguments(host: str, identity: str) -> list[str]:
    """Return the vLLM arguments that enable KV handover, with data ports at the address `host`.

    `identity` identifies the weights: servers exchange KV only with servers of the same identity. The handover key is
    passed in the environment variable HANDOVER_KEY, because all users of a machine can read command lines.
    """
    config = {
        "kv_connector": "KvHandoverConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": host, "identity": identity},
    }
    return ["--kv-transfer-config", json.dumps(config)]
