"""Prepare the fastest start mode that this machine supports for a launch plan, by starting a template.

If a mode cannot be prepared, the reason is returned and the next slower mode is tried. An error is raised only if it would
make every start with these arguments fail.

All stores of a user share templates. A template that `up` started is owned by its store, which stops it. A template that the
user started has no owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import ENGINE, LEVELS, PARKED, RUNTIME, SLEEP_LEVELS, LaunchPlan
from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.launch import template_pool, up_records
from coldstart.launch.modes import LADDER, TemplateMode
from coldstart.launch.server_process import ServerExitedError
from coldstart.launch.template_pool import RunningTemplate
from coldstart.models.inspection import BundleLookup
from coldstart.system.devices import parking
from coldstart.system.paths import Cache

Phase = Callable[[str], AbstractContextManager[Any]]
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Preparation:
    """Prepared template, or None, and the reasons why faster modes failed. `is_new` is False if the template already ran."""

    template: RunningTemplate | None
    is_new: bool
    failures: tuple[Fallback, ...]

    @property
    def mode(self) -> str | None:
        """Return the name of the prepared start mode, or None if no template was prepared."""
        return None if self.template is None else find_mode(self.template.level).name


def prepare_fastest(
    lookup: BundleLookup, plan: LaunchPlan, phase: Phase, timeout_s: float | None = None
) -> Preparation:
    """Prepare the fastest start mode that works for `plan`. The failures of faster modes are returned in `failures`.

    Each step runs in the context manager that `phase` returns for its name, and takes at most `timeout_s` seconds. Raises
    CommandFailedError if no start of this plan can succeed, for example because of invalid arguments.
    """
    failures: list[Fallback] = []
    for level in (ENGINE, RUNTIME):
        try:
            template, is_new = _prepare_template(level, lookup, plan, phase, timeout_s or TIMEOUT_S)
            return Preparation(template, is_new, tuple(failures))
        except ColdstartError as error:
            if isinstance(error, CommandFailedError) and error.is_final:
                raise
            failures.append(Fallback(find_mode(level).name, _explain(error), error.hint))
        except OSError as error:
            failures.append(Fallback(find_mode(level).name, str(error)))
    return Preparation(None, False, tuple(failures))


def _explain(error: ColdstartError) -> str:
    """Return the error as one line: the error in the template's log if one was found, otherwise the message."""
    if isinstance(error, ServerExitedError) and error.cause:
        return f"the template exited before it was ready: {error.cause.message}"
    return error.message.replace("\n", " ")


def list_prepared(cache: Cache) -> Iterator[RunningTemplate]:
    """Yield the templates that `prepare_fastest` started for this store."""
    own = up_records.identify_store(cache)
    return (template for template in template_pool.list_templates() if own in template.owner[:1])


def _prepare_template(
    level: str, lookup: BundleLookup, plan: LaunchPlan, phase: Phase, timeout_s: float
) -> tuple[RunningTemplate, bool]:
    if (usable := _find_usable(level, lookup, plan)) is not None:
        return usable, False
    owner = (up_records.identify_store(lookup.cache), lookup.model.cli_argument, str(lookup.model.path))
    try:
        with phase(f"start a template ({level})"):
            return start_template(level, plan, lookup.model.name, timeout_s, owner=owner), True
    except UsageError:
        # Another store may have started the same template meanwhile.
        if (usable := _find_usable(level, lookup, plan)) is None:
            raise
        return usable, False


def _find_usable(level: str, lookup: BundleLookup, plan: LaunchPlan) -> RunningTemplate | None:
    """Return a running template that fits the plan, or None. A template that no longer fits is stopped.

    Raises CommandFailedError if a template of a different model has the same key.
    """
    name = lookup.model.name
    if (template := template_pool.find_ready(level, plan.key)) is None:
        return None
    if level == ENGINE and template.model != name:
        raise CommandFailedError(
            f"cannot start a template for {name}: a template of {template.model} with the same key is running",
            hint="run `coldstart template stop --level engine`",
        )
    if template_pool.find_incompatibility(template, plan) is None:
        return template
    template_pool.stop_template(template)
    return None


def find_mode(level: str) -> TemplateMode:
    """Return the start mode that uses templates of `level`. Raises UsageError if the level is unknown."""
    for mode in LADDER:
        if isinstance(mode, TemplateMode) and level in mode.levels:
            return mode
    raise UsageError(f"unknown template level {level!r}", hint=f"use one of: {', '.join(LEVELS)}")


def start_template(
    level: str,
    plan: LaunchPlan,
    model: str,
    timeout: float,
    root: Path | None = None,
    owner: Sequence[str] = (),
) -> RunningTemplate:
    """Start a template and wait until it listens. The arguments are those of `template_pool.start_template`.

    Raises:
        UsageError: This machine or plan does not support the template, or one is already running.
        CommandFailedError: The template exits, or is not ready within `timeout` seconds.
    """
    if why := find_mode(level).find_unusable_reason():
        raise UsageError(f"cannot start a template of level {level}: {why.reason}", hint=why.hint)
    if level in SLEEP_LEVELS and not plan.vllm_args.contains_flag("enable_sleep_mode"):
        raise UsageError(
            f"cannot start a template of level {level}: an engine cannot sleep without --enable-sleep-mode",
            hint=f"run `coldstart template start {model} --level {level} -- --enable-sleep-mode`, and serve with it too",
        )
    if level == PARKED and (limit := parking.find_engine_limit(plan.vllm_args)):
        raise UsageError(f"cannot start a template of level {level}: {limit[0]}", hint=limit[1])
    return template_pool.start_template(level, plan, model, timeout, root, owner)
