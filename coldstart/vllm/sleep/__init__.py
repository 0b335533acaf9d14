"""Sleep backend for vLLM that keeps one immutable copy of the weights in host memory."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.vllm import compat

NAME = "coldstart"
"""Name of the backend in vLLM's configuration."""
STAGE = "sleep"
"""Stage of the backend's fallbacks."""
MODULE = "coldstart.vllm.sleep.backend"
EXTENSION = f"{MODULE}.SleepExtension"
"""Class whose methods vLLM adds to its worker class. They pass the model to the backend."""
ALLOCATOR = "vllm.device_allocator.cumem"
OWN = "coldstart's sleep backend is not used"


def choose_backend(args: Namespace) -> Fallback | None:
    """Choose this backend in the engine arguments `args`, or return the fallback to another backend."""
    reason = _find_reason(args)
    if reason is None:
        args.worker_extension_cls = EXTENSION
    return None if reason is None else Fallback(STAGE, f"{reason}; {OWN}")


def _find_reason(args: Namespace) -> str | None:
    if args.worker_extension_cls:
        return f"--worker-extension-cls is already set to {args.worker_extension_cls}"
    # "cumem" is the default; before 0.33 vLLM has no such argument.
    if (backend := getattr(args, "sleep_mode_backend", "cumem")) != "cumem":
        return f"--sleep-mode-backend is already set to {backend}"
    if getattr(args, "sleep_mode_offload_cudagraph", False):
        return "only vLLM's backend implements --sleep-mode-offload-cudagraph"
    backends: list[Any] = []
    if reason := compat.find_unsupported_reason(
        "sleep", lambda: backends.append(import_module(MODULE).ColdstartBackend)
    ):
        return reason
    if not backends[0].is_supported():
        return "the CUDA driver bindings are missing (run `coldstart install gpu`)"
    return None


async def manage_worker_weights(engine: Any, model: str) -> Fallback | None:
    """Pass each worker's model to the backend. Return the fallback to vLLM's own backend if that fails, else None."""
    try:
        reasons = await engine.collective_rpc("coldstart_bind_weights_to_sleep", args=(model,))
    except Exception as error:  # noqa: BLE001 - of any worker, which then uses vLLM's backend
        reasons = [f"{type(error).__name__}: {error}"]
    reason = next(filter(None, reasons), None)
    return None if reason is None else Fallback(STAGE, f"{reason}; {OWN}")


async def pop_fallbacks(engine: Any) -> list[Fallback]:
    """Return the distinct fallbacks of all workers since the last call."""
    taken = await engine.collective_rpc("coldstart_take_sleep_fallbacks")
    return [Fallback(STAGE, reason) for reason in dict.fromkeys(reason for one in taken for reason in one)]


def is_memory_unmapped() -> bool:
    """Return whether vLLM's allocator has unmapped GPU memory of this worker, as in each sleep of level 1 or 2."""
    module: Any = sys.modules.get(ALLOCATOR)  # only an engine with sleep mode imports it
    allocator = None if module is None else module.CuMemAllocator.instance
    return allocator is not None and any(one.is_asleep for one in allocator.pointer_to_data.values())
