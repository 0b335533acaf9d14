"""Check and parse the options of trace-replay, before the trace is read."""

import json
import shlex
from pathlib import Path
from typing import Any

from coldstart.errors import UsageError
from coldstart.lab.replay import Slo
from coldstart.lab.replay.compare import compare


def check_target(
    file: Path, *, simulate: bool, target: bool, host: Path | None, fleet: Path | None, profile: str | None
) -> None:
    """Raise UsageError unless the options select one target: servers, or one of the three simulations."""
    if host is not None and fleet is not None:
        raise UsageError(
            "--host and --fleet exclude each other: each chooses its own simulation", hint="give one of them"
        )
    name, times = shlex.quote(str(file)), shlex.quote(profile or "REF")
    if host is not None and not simulate:
        hint = f"coldstart trace-replay {name} --simulate --host {shlex.quote(str(host))} --profile {times}"
        raise UsageError("--host needs --simulate", hint=hint)
    if fleet is not None and not simulate:
        hint = f"coldstart trace-replay {name} --simulate --fleet {shlex.quote(str(fleet))}"
        raise UsageError("--fleet needs --simulate", hint=hint)
    if simulate and target:
        raise UsageError("--target and --simulate exclude each other", hint="remove one of them")
    if not simulate and not target:
        simulation = f"coldstart trace-replay {name} --simulate --profile {times}"
        raise UsageError(
            "choose one of --target and --simulate",
            hint=f"coldstart trace-replay {name} --target URL; without a server: {simulation}",
        )


def check_positive(**given: float | None) -> None:
    """Raise UsageError for an option, named by its keyword, whose value is not above 0. None means not given."""
    for option, value in given.items():
        if value is not None and not value > 0:
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(
                f"{flag} {value:g}: expected a number above 0", hint=f"write {flag} 1, or omit it"
            )


def parse_models(given: str | None) -> tuple[str, ...]:
    """Return the names in `given`, separated by commas. Raises UsageError for an empty name."""
    names = tuple(given.split(",")) if given is not None else ()
    if not all(name.strip() for name in names):
        raise UsageError(
            f"--models {given!r} contains an empty name", hint="write names separated by commas: --models a,b"
        )
    return names


def parse_slo(given: str) -> Slo:
    """Return the limits. Raises UsageError."""
    try:
        return Slo.parse(given)
    except ValueError as problem:
        raise UsageError(
            f"--slo: {problem}", hint="write limits in seconds: --slo ttft=2,tpot=0.1"
        ) from problem


def read_baseline(path: Path | None) -> dict[str, Any] | None:
    """Return the result of an earlier replay, None without a path. Raises UsageError if the file contains no result."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        compare(found, found)
    except (ValueError, AttributeError, TypeError) as problem:
        hint = "create one: coldstart trace-replay ... --format json -o FILE"
        raise UsageError(f"--baseline {path}: {problem}", hint=hint) from problem
    return dict(found)
