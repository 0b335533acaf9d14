"""vLLM's own API server, unchanged: the fallback for unsupported vLLM versions, and the baseline in benchmarks.

Invariant: vLLM is not patched. A thread in the server process polls the server over HTTP, as any client would, and reports
readiness to the process that started it.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Mapping
from threading import Thread

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.scheduling.settings import uses_deadlines
from coldstart.system.ipc import addresses
from coldstart.vllm import compat
from coldstart.vllm.engine.readiness import send_report, take_ready_pipe
from coldstart.vllm.handover import CONNECTOR
from coldstart.vllm.scheduling import SCHEDULER_CLS
from coldstart.vllm.weights.entry import LOAD_FORMAT

ENTRY_POINT = "vllm.entrypoints.openai.api_server"
DEFAULT_PORT = 8000
PATIENCE_S, PAUSE_S = 1.0, 0.1


def run(plan: LaunchPlan, reason: str) -> int:
    """Run vLLM's own server until it exits, and return its exit code. Report `reason` as a fallback."""
    plan.fallbacks.append(Fallback("start", f"{reason}; vLLM's own server runs"))
    if (descriptor := take_ready_pipe()) >= 0:
        Thread(target=_acknowledge, args=(plan, descriptor), name="readiness", daemon=True).start()
    sys.argv = [ENTRY_POINT, *_drop_unsupported_arguments(plan)]
    try:
        runpy.run_module(ENTRY_POINT, run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _drop_unsupported_arguments(plan: LaunchPlan) -> list[str]:
    """Return the arguments that this vLLM and its server support, and report each unsupported one as a fallback."""
    given, dropped = plan.vllm_args, set[str]()
    if given.get_value("scheduler_cls") == SCHEDULER_CLS:
        dropped |= {"--scheduler-cls", "--additional-config", "--kv-transfer-config"}
        plan.fallbacks.append(Fallback("scheduler", "vLLM's own server uses vLLM's own scheduler"))
    elif uses_deadlines(given.get_value("additional_config")):
        dropped |= {"--scheduling-policy", "--additional-config"}
        plan.fallbacks.append(Fallback("scheduler", "vLLM's own server does not support deadlines"))
    if given.get_value("load_format") == LOAD_FORMAT and (
        reason := compat.find_unsupported_reason("weights")
    ):
        dropped.add("--load-format")
        plan.fallbacks.append(Fallback("weights", f"{reason}; vLLM's own loader reads the weights"))
    transfer = given.get_value("kv_transfer_config")
    if isinstance(transfer, Mapping) and transfer.get("kv_connector_module_path") == CONNECTOR:
        dropped.add("--kv-transfer-config")
        plan.fallbacks.append(Fallback("handover", "vLLM's own server does not move requests with their KV"))
    return [one for flag, one in zip(["", *given], given, strict=False) if not {flag, one} & dropped]


def _acknowledge(plan: LaunchPlan, descriptor: int) -> None:
    """Report readiness once the server responds. No token is generated, because nothing was restored."""
    given = plan.vllm_args
    scheme = "https" if given.contains_flag("ssl_certfile") else "http"
    url = addresses.build_local_url(
        str(given.get_value("host") or "127.0.0.1"), given.get_integer("port", DEFAULT_PORT), scheme
    )
    # With a Unix socket, vLLM does not listen on a port.
    while not _answers(f"{url}/health", str(given.get_value("uds")) if given.get_value("uds") else None):
        time.sleep(PAUSE_S)
    named = fallback.encode(plan.fallbacks)
    send_report(descriptor, {"fast_path": {"start": False}, "fallbacks": named, "tokens": [], "canary": None})


def _answers(url: str, socket: str | None) -> bool:
    """Return whether the server responds. Its certificate is not verified."""
    import httpx

    transport = httpx.HTTPTransport(verify=False, uds=socket)
    # Do not use a proxy from the environment for a local server.
    with httpx.Client(transport=transport, timeout=PATIENCE_S, trust_env=False) as client:
        try:
            return client.get(url).status_code == 200
        except httpx.HTTPError:
            return False
