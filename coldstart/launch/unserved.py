"""Flags that only `vllm serve` itself acts on: parsed by every server here, honoured by none, so named in `fallbacks`.

vLLM's command line reads them before it chooses what to launch. Here one process serves the API over HTTP, in every mode alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback

_ONE = "one process serves the API here"
_HTTP = "the API is served over HTTP alone here"
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

# Values that ask for what there is: nothing, or one server.
_AS_IT_IS = ((None, False), (None, 0, 1))


def fallbacks(given: Arguments) -> list[Fallback]:
    """One line for each flag that was given and is not acted on; a server count of one is what there is."""
    return [
        Fallback("server", f"--{name.replace('_', '-')} is not honoured: {reason}.")
        for name, reason in FLAGS.items()
        if given.value(name) not in _AS_IT_IS[name == "api_server_count"]
    ]
