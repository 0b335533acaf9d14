"""Prepare a start mode: start its template, or freeze the runtime, where this machine permits the mode."""

from __future__ import annotations

from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import LEVELS, SLEEP_LEVELS
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import runtime_snapshot, template_pool
from coldstart.launch.modes import LADDER
from coldstart.launch.modes.from_template import TemplateMode
from coldstart.launch.modes.runtime_snapshot import RUNTIME_SNAPSHOT
from coldstart.launch.template_pool import Warm
from coldstart.system.paths import Cache


def find_mode(level: str) -> TemplateMode:
    """Return the start mode that a template of `level` serves. Raises UsageError for an unknown level."""
    for mode in LADDER:
        if isinstance(mode, TemplateMode) and level in mode.levels:
            return mode
    raise UsageError(f"There is no template level {level!r}.", hint=f"take one of {', '.join(LEVELS)}")


def start_template(
    level: str, plan: LaunchPlan, model: str, timeout: float, root: Path | None = None
) -> Warm:
    """Start a template and wait until it listens.

    Raises UsageError where this machine or plan permits no such template, and what `template_pool.start` raises.
    """
    if why := find_mode(level).unavailable():
        raise UsageError(f"No template of level {level}: {why.reason}.", hint=why.hint)
    if level in SLEEP_LEVELS and not plan.vllm_args.gives("enable_sleep_mode"):
        raise UsageError(
            "vLLM's engine cannot sleep without --enable-sleep-mode.",
            hint=f"give it everywhere: coldstart template start {model} --level asleep-1 -- --enable-sleep-mode",
        )
    return template_pool.start(level, plan, model, timeout, root)


def freeze_runtime(cache: Cache, timeout: float) -> Path:
    """Freeze the imported runtime and return its directory. Raises CommandFailedError where this machine cannot."""
    if why := RUNTIME_SNAPSHOT.unavailable():
        raise CommandFailedError(f"The runtime cannot be frozen here: {why.reason}.", hint=why.hint)
    return runtime_snapshot.freeze(cache, timeout)
