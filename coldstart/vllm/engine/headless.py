"""Run a node without an API (`--headless`), whose workers belong to the first node. It ends with them."""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import Namespace

from coldstart.contract import fallback
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.vllm import compat


def run(args: Namespace, plan: LaunchPlan) -> int:
    """Run this node's workers with vLLM's own code until they end, and return the exit code.

    The node reports readiness at once and without a token: only the first node can generate one, and it waits for this one.
    Headless nodes have no fallback: a vLLM without them gives exit code 1 and the reason.
    """
    if reason := compat.check("headless", _import_headless):
        sys.stderr.write(f"coldstart: cannot run a node without an API: {reason}\n")
        return 1
    from vllm.entrypoints.cli.serve import run_headless

    descriptor = int(os.environ.pop(READY_FD_ENV, "-1"))
    if descriptor >= 0:
        named = fallback.encode(plan.fallbacks)
        report = {"fast_path": {}, "fallbacks": named, "tokens": [], "headless": True}
        os.write(descriptor, (json.dumps(report) + "\n").encode())
        os.close(descriptor)
    args.api_server_count = 0  # as vLLM's own command sets it
    gc.enable()
    run_headless(args)
    return 0


def _import_headless() -> None:
    from vllm.entrypoints.cli.serve import run_headless  # noqa: F401
