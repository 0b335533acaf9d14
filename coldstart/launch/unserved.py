"""vLLM flags that only the `vllm serve` command acts on. Servers here parse and ignore them, with a fallback for each.

vLLM's command line reads these flags before it chooses what to launch. Here one process serves the API over HTTP in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback

_ONE = "coldstart serves the API with one process"
_HTTP = "coldstart serves the API over HTTP only"
_SUPERVISOR = (
    "only the supervisor of --data-parallel-multi-port-external-lb reads it, which does not run here"
)
FLAGS: Mapping[str, str] = {
    "api_server_count": _ONE,
    "grpc": _HTTP,
    "grpc_port": _HTTP,
    "data_parallel_supervisor_port": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
}

# Values that ask for the default: no value, or one server.
_AS_IT_IS = ((None, False), (None, 0, 1))


def fallbacks(given: Arguments) -> list[Fallback]:
    """Return a fallback for each flag in `given` that has no effect."""
    return [
        Fallback("server", f"--{name.replace('_', '-')} has no effect: {reason}.")
        for name, reason in FLAGS.items()
        if given.value(name) not in _AS_IT_IS[name == "api_server_count"]
    ]
