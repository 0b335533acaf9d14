"""Prepare a start mode: start its template, or freeze the runtime, where this machine permits the mode."""

from __future__ import annotations

from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import LEVELS, SLEEP_LEVELS
from coldstart.errors import CommandFailed, Usage
from coldstart.launch import runtime_snapshot, template_pool
from coldstart.launch.modes import LADDER
from coldstart.launch.modes.from_template import TemplateMode
from coldstart.launch.modes.runtime_snapshot import RUNTIME_SNAPSHOT
from coldstart.launch.template_pool import Warm
from coldstart.system.paths import Cache


def find_mode(level: str) -> TemplateMode:
    """Return the start mode that a template of `level` serves. Raises Usage for an unknown level."""
    for mode in LADDER:
        if isinstance(mode, TemplateMode) and level in mode.levels:
            return mode
    raise Usage(f"There is no template level {level!r}.", mend=f"take one of {', '.join(LEVELS)}")


def start_template(
    level: str, plan: LaunchPlan, model: str, timeout: float, root: Path | None = None
) -> Warm:
    """Start a template and wait until it listens.

    Raises Usage where this machine or plan permits no such template, and what `template_pool.start` raises.
    """
    if why := find_mode(level).unavailable():
        raise Usage(f"No template of level {level}: {why.reason}.", mend=why.hint)
    if level in SLEEP_LEVELS and not plan.vllm_args.gives("enable_sleep_mode"):
        raise Usage(
            "vLLM's engine cannot sleep without --enable-sleep-mode.",
            mend=f"give it everywhere: coldstart template start {model} --level asleep-1 -- --enable-sleep-mode",
        )
    return template_pool.start(level, plan, model, timeout, root)


def freeze_runtime(cache: Cache, timeout: float) -> Path:
    """Freeze the imported runtime and return its directory. Raises CommandFailed where this machine cannot."""
    if why := RUNTIME_SNAPSHOT.unavailable():
        raise CommandFailed(f"The runtime cannot be frozen here: {why.reason}.", mend=why.hint)
    return runtime_snapshot.freeze(cache, timeout)
