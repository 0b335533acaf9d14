"""Prepare the fastest start mode that this machine allows for a launch plan: a template, else the frozen runtime.

A failed preparation raises only where each start with these arguments fails. Otherwise its reason is returned, and the next
slower preparation is tried.

All stores of a user share templates. The store whose `up` started a template owns it, and ends it. A template that a user
started has no owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import ENGINE, LEVELS, RUNTIME, SLEEP_LEVELS
from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.launch import runtime_snapshot, template_pool, up_records
from coldstart.launch.modes import LADDER, RUNTIME_SNAPSHOT, TemplateMode
from coldstart.launch.template_pool import Warm
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image

Phase = Callable[[str], AbstractContextManager[Any]]
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Preparation:
    """The prepared start mode, None without one, and why each faster mode is not prepared.

    `is_new` is false if an earlier preparation was found.
    """

    mode: str | None
    is_new: bool
    failures: tuple[Fallback, ...]


def prepare_fastest(
    lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float | None = None
) -> Preparation:
    """Prepare the fastest mode for the plan. `phase` is entered around each step, and `timeout_s` limits each step.

    Raises CommandFailedError if no start of this plan can succeed, for example because of invalid arguments.
    """
    failures: list[Fallback] = []
    for mode, prepare in _list_steps(lookup, plan, phase, timeout_s or TIMEOUT_S):
        try:
            return Preparation(mode, prepare(), tuple(failures))
        except ColdstartError as error:
            if isinstance(error, CommandFailedError) and error.is_final:
                raise
            failures.append(Fallback(mode, _explain(error), error.hint))
        except OSError as error:
            failures.append(Fallback(mode, str(error)))
    return Preparation(None, False, tuple(failures))


def _explain(error: ColdstartError) -> str:
    """Return the error in one line: the cause instead of the end of a log, if the log names it."""
    if isinstance(error, template_pool.TemplateExitedError) and error.cause:
        return f"the template exited before it was ready: {error.cause}"
    return error.message.replace("\n", " ")


def find_template(lookup: Lookup, prepared: Preparation) -> Warm | None:
    """Return the template of a preparation, None if it prepared another mode or if the template has ended."""
    levels = [level for level in (ENGINE, RUNTIME) if find_mode(level).name == prepared.mode]
    return template_pool.find(levels[0], lookup.key.digest) if levels else None


def list_prepared(cache: Cache) -> Iterator[Warm]:
    """Yield the templates that `prepare_fastest` started for this store. Their owner has the name and the path of the model."""
    own = up_records.identify_store(cache)
    return (warm for warm in template_pool.listed() if own in warm.owner[:1])


def _list_steps(
    lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float
) -> Iterator[tuple[str, Callable[[], bool]]]:
    for level in (ENGINE, RUNTIME):
        mode = find_mode(level).name
        yield mode, partial(_prepare_template, level, lookup, plan, phase, timeout_s)
    yield RUNTIME_SNAPSHOT.name, partial(_prepare_runtime, lookup, phase, timeout_s)


def _prepare_template(level: str, lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float) -> bool:
    """Return whether a template was started, False if a usable one runs. Raises ColdstartError."""
    # Another store may prepare the same template now.
    with template_pool.locked(level, plan.key):
        if _find_usable(level, lookup, plan) is not None:
            return False
        store = up_records.identify_store(lookup.cache)
        with phase(f"start a template ({level})"):
            owner = (store, lookup.model.argument, str(lookup.model.path))
            start_template(level, plan, lookup.model.name, timeout_s, owner=owner)
    return True


def _find_usable(level: str, lookup: Lookup, plan: LaunchPlan) -> Warm | None:
    """Return the template that can serve the plan. Stop one that cannot. Raises CommandFailedError for another model's."""
    name = lookup.model.name
    if (warm := template_pool.find(level, plan.key)) is None:
        return None
    if level == ENGINE and warm.model != name:
        raise CommandFailedError(
            f"a template of {warm.model} runs, which has the same key as {name}",
            hint="coldstart template stop --level engine",
        )
    if template_pool.obstacle(warm, plan) is None:
        return warm
    template_pool.stop(warm)
    return None


def _prepare_runtime(lookup: Lookup, phase: Phase, timeout_s: float) -> bool:
    """Return whether the runtime was frozen, False if a usable image exists. Raises ColdstartError."""
    if RUNTIME_SNAPSHOT.unavailable() is None and find_frozen_runtime(lookup.cache):
        return False
    with phase("freeze the imported runtime"):
        freeze_runtime(lookup.cache, timeout_s)
    return True


def find_mode(level: str) -> TemplateMode:
    """Return the start mode that a template of `level` serves. Raises UsageError for an unknown level."""
    for mode in LADDER:
        if isinstance(mode, TemplateMode) and level in mode.levels:
            return mode
    raise UsageError(f"unknown template level {level!r}", hint=f"use one of {', '.join(LEVELS)}")


def start_template(
    level: str,
    plan: LaunchPlan,
    model: str,
    timeout: float,
    root: Path | None = None,
    owner: Sequence[str] = (),
) -> Warm:
    """Start a template and wait until it listens. Arguments as of `template_pool.start`.

    Raises:
        UsageError: This machine or this plan does not permit such a template, or one already runs.
        CommandFailedError: The template exits, or is not ready in `timeout` seconds.
    """
    if why := find_mode(level).unavailable():
        raise UsageError(f"cannot start a template of level {level}: {why.reason}", hint=why.hint)
    if level in SLEEP_LEVELS and not plan.vllm_args.gives("enable_sleep_mode"):
        raise UsageError(
            "vLLM's engine cannot sleep without --enable-sleep-mode",
            hint=f"pass it to every command: coldstart template start {model} --level asleep-1 -- --enable-sleep-mode",
        )
    return template_pool.start(level, plan, model, timeout, root, owner)


def find_frozen_runtime(cache: Cache) -> Path | None:
    """Return the directory of the frozen runtime that this interpreter can thaw, None if there is none."""
    image = runtime_snapshot.find_image(cache)
    if image is None or runtime_image.described(image).obstacle is not None:
        return None
    return image


def freeze_runtime(cache: Cache, timeout: float) -> Path:
    """Freeze the imported runtime and return its directory. Raises CommandFailedError if this machine cannot."""
    if why := RUNTIME_SNAPSHOT.unavailable():
        raise CommandFailedError(f"cannot freeze the runtime: {why.reason}", hint=why.hint)
    return runtime_snapshot.freeze(cache, timeout)
