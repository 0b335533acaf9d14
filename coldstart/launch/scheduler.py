"""Translate a scheduler choice into vLLM flags.

Invariant: the choice is not part of the bundle key. The request order, the batch limit and KV copies in host memory do not
affect compiled code, weights or the KV cache size, so one bundle and one template work with every scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import UsageError
from coldstart.scheduling.classes import RequestClasses
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.scheduling.settings import DEADLINE, FCFS, MLFQ, SchedulerSettings

DEFAULT_HOST_BYTES = 1 << 30
# vLLM flags that a scheduler choice sets. The user can set these flags or choose a scheduler, but not both.
_OURS = ("scheduler_cls", "additional_config", "kv_transfer_config")
_DEADLINE = ("scheduler_cls", "additional_config", "scheduling_policy")
_COPIES_FLAG = "--kv-transfer-config"
_CPU_CORES = (environment.VLLM_CPU_OMP_THREADS_BIND, environment.VLLM_CPU_NUM_OF_RESERVED_CPU)


STOCK = SchedulerSettings(FCFS)
"""vLLM's own scheduler, unchanged."""


def check_scheduler(choice: SchedulerSettings, vllm_args: Arguments) -> None:
    """Raise UsageError if the scheduler settings are invalid, or if `vllm_args` select another scheduler."""
    if choice == STOCK:
        return
    try:
        choice.check_command_line()
        SchedulerSettings.from_additional_config(choice.build_additional_config())
    except ValueError as problem:
        raise UsageError(
            f"invalid scheduler settings: {problem}", hint="see `coldstart serve --help`"
        ) from problem
    if choice.classes is not None:
        RequestClasses(Path(choice.classes))
    names = {FCFS: (), DEADLINE: _DEADLINE}.get(choice.policy, _OURS)
    if taken := [name for name in names if vllm_args.contains_flag(name)]:
        flag = "--" + taken[0].replace("_", "-")
        raise UsageError(
            f"{flag} cannot be combined with --scheduler {choice.policy}, which sets it",
            hint=f"omit {flag} or --scheduler",
        )


def apply_scheduler(
    plan: LaunchPlan, choice: SchedulerSettings, bundle: Bundle | None, *, on_cpu: bool
) -> LaunchPlan:
    """Return the plan with the chosen scheduler, which must have passed `check_scheduler`."""
    if choice == STOCK:
        return plan
    from coldstart.vllm.scheduling import build_serve_arguments

    ranks, profile, fallbacks = plan.vllm_args.ranks_per_node(), None, list[Fallback]()
    if choice.policy != FCFS:
        profile, fallbacks = _profile(bundle)
    host_bytes = choice.host_bytes or (_host_bytes(bundle) if choice.policy == MLFQ else None)
    flags = build_serve_arguments(replace(choice, profile=profile, host_bytes=host_bytes), on_cpu=on_cpu)
    return replace(
        plan,
        vllm_args=plan.vllm_args.append(*flags),
        env=plan.env | (reserve_cores(ranks) if on_cpu and _COPIES_FLAG in flags else {}),
        fallbacks=[*plan.fallbacks, *fallbacks],
    )


def _profile(bundle: Bundle | None) -> tuple[Mapping[str, object] | None, list[Fallback]]:
    """Return the bundle's iteration profile, or None and a fallback if it is missing or invalid."""
    try:
        if bundle is not None and bundle.has_section("iterations"):
            return IterationProfile.parse(bundle.read_json("iterations")).encode(), []
        reason = "the bundle has no iteration profile: requests are ordered with a typical profile"
    except (ProfileError, BundleError) as problem:
        reason = f"{problem}: requests are ordered with a typical profile"
    return None, [Fallback("iterations", reason)]


def _host_bytes(bundle: Bundle | None) -> int:
    """Return the bytes of host memory for KV copies: the size of the bundle's KV cache if known, otherwise a default."""
    try:
        sizing = bundle.read_json("kv") if bundle is not None and bundle.has_section("kv") else None
    except BundleError:
        sizing = None
    size = sizing.get("bytes") if isinstance(sizing, Mapping) else None
    return size if isinstance(size, int) and size > 0 else DEFAULT_HOST_BYTES


def reserve_cores(ranks: int) -> dict[str, str]:
    """Return the variable that makes vLLM reserve one CPU core per rank, without the second core for KV transfer."""
    if any(name in os.environ for name in _CPU_CORES):
        return {}
    return {environment.VLLM_CPU_NUM_OF_RESERVED_CPU: str(ranks)}
