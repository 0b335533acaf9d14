"""Prepare a start mode: start its template, or freeze the runtime, if this machine permits the mode."""

from __future__ import annotations

from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import LEVELS, SLEEP_LEVELS
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import runtime_snapshot, template_pool
from coldstart.launch.modes import LADDER, RUNTIME_SNAPSHOT, TemplateMode
from coldstart.launch.template_pool import Warm
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image


def find_mode(level: str) -> TemplateMode:
    """Return the start mode that a template of `level` serves. Raises UsageError for an unknown level."""
    for mode in LADDER:
        if isinstance(mode, TemplateMode) and level in mode.levels:
            return mode
    raise UsageError(f"Unknown template level {level!r}.", hint=f"use one of {', '.join(LEVELS)}")


def start_template(
    level: str, plan: LaunchPlan, model: str, timeout: float, root: Path | None = None
) -> Warm:
    """Start a template and wait until it listens.

    Raises:
        UsageError: This machine or this plan does not permit such a template, or one already runs.
        CommandFailedError: The template exits, or is not ready in `timeout` seconds.
    """
    if why := find_mode(level).unavailable():
        raise UsageError(f"Cannot start a template of level {level}: {why.reason}.", hint=why.hint)
    if level in SLEEP_LEVELS and not plan.vllm_args.gives("enable_sleep_mode"):
        raise UsageError(
            "vLLM's engine cannot sleep without --enable-sleep-mode.",
            hint=f"pass it to every command: coldstart template start {model} --level asleep-1 -- --enable-sleep-mode",
        )
    return template_pool.start(level, plan, model, timeout, root)


def find_frozen_runtime(cache: Cache) -> Path | None:
    """Return the directory of the frozen runtime that this interpreter can thaw, None if there is none."""
    image = runtime_snapshot.find_image(cache)
    if image is None or runtime_image.described(image).obstacle is not None:
        return None
    return image


def freeze_runtime(cache: Cache, timeout: float) -> Path:
    """Freeze the imported runtime and return its directory. Raises CommandFailedError if this machine cannot."""
    if why := RUNTIME_SNAPSHOT.unavailable():
        raise CommandFailedError(f"Cannot freeze the runtime: {why.reason}.", hint=why.hint)
    return runtime_snapshot.freeze(cache, timeout)
