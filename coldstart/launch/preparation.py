"""Prepare the fastest start mode that this machine allows for a launch plan: a template, else the frozen runtime.

A failed preparation never raises: its reason is returned, and the next slower preparation is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from coldstart.artifacts import files
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import ENGINE, RUNTIME
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.launch import prepare_template, template_pool
from coldstart.launch.modes.runtime_snapshot import RUNTIME_SNAPSHOT
from coldstart.launch.template_pool import Warm
from coldstart.models.inspection import Lookup

Phase = Callable[[str], AbstractContextManager[Any]]
TIMEOUT_S = 600.0
# File in a template's directory: the model's name and path on two lines.
_PREPARED_FOR = "prepared-for"


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
    """Prepare the fastest mode for the plan. `phase` is entered around each step, and `timeout_s` limits each step."""
    failures: list[Fallback] = []
    for mode, prepare in _list_steps(lookup, plan, phase, timeout_s or TIMEOUT_S):
        try:
            return Preparation(mode, prepare(), tuple(failures))
        except ColdstartError as error:
            failures.append(Fallback(mode, error.message.replace("\n", " "), error.hint))
        except OSError as error:
            failures.append(Fallback(mode, str(error)))
    return Preparation(None, False, tuple(failures))


def list_prepared() -> Iterator[tuple[Warm, Sequence[str]]]:
    """Yield the templates that `prepare_fastest` started, with name and path of the model."""
    for warm in template_pool.listed():
        with suppress(OSError, ValueError):  # another command started it
            yield warm, (warm.directory / _PREPARED_FOR).read_text(encoding="utf-8").splitlines()


def _list_steps(
    lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float
) -> Iterator[tuple[str, Callable[[], bool]]]:
    for level in (ENGINE, RUNTIME):
        mode = prepare_template.find_mode(level).name
        yield mode, partial(_prepare_template, level, lookup, plan, phase, timeout_s)
    yield RUNTIME_SNAPSHOT.name, partial(_prepare_runtime, lookup, phase, timeout_s)


def _prepare_template(level: str, lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float) -> bool:
    """Return whether a template was started, False if a usable one runs. Raises ColdstartError."""
    name = lookup.model.name
    if (warm := template_pool.find(level, plan.key)) is not None:
        if level == ENGINE and warm.model != name:
            raise CommandFailedError(
                f"a template of {warm.model} runs, which has the same key as {name}",
                hint="coldstart template stop --level engine",
            )
        if template_pool.obstacle(warm, plan) is None:
            return False
        template_pool.stop(warm)
    with phase(f"start a template ({level})"):
        warm = prepare_template.start_template(level, plan, name, timeout_s)
    owner = f"{lookup.model.argument}\n{lookup.model.path}\n"
    files.write_atomic(warm.directory / _PREPARED_FOR, owner.encode())
    return True


def _prepare_runtime(lookup: Lookup, phase: Phase, timeout_s: float) -> bool:
    """Return whether the runtime was frozen, False if a usable image exists. Raises ColdstartError."""
    if RUNTIME_SNAPSHOT.unavailable() is None and prepare_template.find_frozen_runtime(lookup.cache):
        return False
    with phase("freeze the imported runtime"):
        prepare_template.freeze_runtime(lookup.cache, timeout_s)
    return True
