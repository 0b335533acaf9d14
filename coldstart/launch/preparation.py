"""Prepare the fastest start mode that this machine allows for a launch plan: a template, else the frozen runtime.

A failed preparation raises only where each start with these arguments fails. Otherwise its reason is returned, and the next
slower preparation is tried.

All stores of a user share templates. A template has a file for each store whose `up` uses it, and ends with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import ENGINE, RUNTIME
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.launch import prepare_template, template_pool, up_records
from coldstart.launch.modes import RUNTIME_SNAPSHOT
from coldstart.launch.template_pool import Warm
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache

Phase = Callable[[str], AbstractContextManager[Any]]
TIMEOUT_S = 600.0
# Start of the name of a store's file in a template's directory: the model's name and path on two lines. The digest of the
# store follows; an earlier release wrote none.
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
    """Prepare the fastest mode for the plan. `phase` is entered around each step, and `timeout_s` limits each step.

    Raises CommandFailedError where every start of the plan fails, such as one with invalid arguments.
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
    levels = [level for level in (ENGINE, RUNTIME) if prepare_template.find_mode(level).name == prepared.mode]
    return template_pool.find(levels[0], lookup.key.digest) if levels else None


def list_prepared(cache: Cache) -> Iterator[tuple[Warm, Sequence[str]]]:
    """Yield the templates that `prepare_fastest` prepared for this store, with name and path of the model."""
    for warm in template_pool.listed():
        if (
            owner := _list_owners(warm).get(up_records.identify_store(cache)) or _find_old(warm, cache)
        ) is not None:
            yield warm, owner


def stop_prepared(warm: Warm, cache: Cache) -> bool:
    """Stop a template of `list_prepared`. Return False, and release it, if `up` prepared it for another store, too.

    Raises CommandFailedError while its servers run.
    """
    own = up_records.identify_store(cache)
    if _list_owners(warm).keys() - {own, "" if _find_old(warm, cache) else own}:
        for name in (own, ""):
            _place_owner(warm, name).unlink(missing_ok=True)
        return False
    template_pool.stop(warm)
    return True


def _list_owners(warm: Warm) -> dict[str, Sequence[str]]:
    """Return name and path of the model by the digest of each store that uses the template, "" for an unknown one."""
    found: dict[str, Sequence[str]] = {}
    for file in warm.directory.glob(f"{_PREPARED_FOR}*"):
        with suppress(OSError, ValueError):  # it is being removed
            found[file.name.removeprefix(_PREPARED_FOR).removeprefix("-")] = files.read_text(
                file
            ).splitlines()
    return found


def _find_old(warm: Warm, cache: Cache) -> Sequence[str] | None:
    owner = _list_owners(warm).get("")
    return owner if owner and up_records.is_of_store(owner[0], owner[-1], cache) else None


def _place_owner(warm: Warm, store: str) -> Path:
    return warm.directory / (f"{_PREPARED_FOR}-{store}" if store else _PREPARED_FOR)


def _list_steps(
    lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float
) -> Iterator[tuple[str, Callable[[], bool]]]:
    for level in (ENGINE, RUNTIME):
        mode = prepare_template.find_mode(level).name
        yield mode, partial(_prepare_template, level, lookup, plan, phase, timeout_s)
    yield RUNTIME_SNAPSHOT.name, partial(_prepare_runtime, lookup, phase, timeout_s)


def _prepare_template(level: str, lookup: Lookup, plan: LaunchPlan, phase: Phase, timeout_s: float) -> bool:
    """Return whether a template was started, False if a usable one runs. Raises ColdstartError."""
    # Another store may prepare the same template now.
    with template_pool.locked(level, plan.key):
        if (warm := _find_usable(level, lookup, plan)) is not None:
            if _list_owners(warm):  # otherwise a user started it, and it outlives `down`
                _add_owner(warm, lookup)
            return False
        with phase(f"start a template ({level})"):
            _add_owner(prepare_template.start_template(level, plan, lookup.model.name, timeout_s), lookup)
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


def _add_owner(warm: Warm, lookup: Lookup) -> None:
    owner = f"{lookup.model.argument}\n{lookup.model.path}\n"
    files.write_atomic(_place_owner(warm, up_records.identify_store(lookup.cache)), owner.encode())


def _prepare_runtime(lookup: Lookup, phase: Phase, timeout_s: float) -> bool:
    """Return whether the runtime was frozen, False if a usable image exists. Raises ColdstartError."""
    if RUNTIME_SNAPSHOT.unavailable() is None and prepare_template.find_frozen_runtime(lookup.cache):
        return False
    with phase("freeze the imported runtime"):
        prepare_template.freeze_runtime(lookup.cache, timeout_s)
    return True
