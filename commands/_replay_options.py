"""Check and parse the options of trace-replay, before the trace is read."""

import shlex
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical

from coldstart.errors import UsageError, describe
from coldstart.lab.records import compare
from coldstart.lab.records import parse_slo as parse
from coldstart.scheduling import settings


def check_target(
    file: Path, *, simulate: bool, target: bool, host: Path | None, fleet: Path | None, profile: str | None
) -> None:
    """Raise UsageError unless the options select one target: servers, or one of the three simulations."""
    if host is not None and fleet is not None:
        raise UsageError(
            "--host and --fleet exclude each other: each chooses its own simulation", hint="give one of them"
        )
    name, times = shlex.quote(str(file)), shlex.quote(profile or "REF")
    if simulate and target:
        flag = "--host" if host else "--fleet" if fleet else "--simulate"
        raise UsageError(f"--target and {flag} exclude each other", hint="remove one of them")
    if not simulate and not target:
        simulation = f"coldstart trace-replay {name} --simulate --profile {times}"
        raise UsageError(
            "choose one of --target and --simulate",
            hint=f"coldstart trace-replay {name} --target URL; without a server: {simulation}",
        )


_LIVE, _ENGINE = "replay on servers (--target)", "replay on the simulated engine (--simulate)"
_HOST, _FLEET = "replay on a simulated host (--host)", "replay on a simulated fleet (--fleet)"
# Options, by parameter, that have an effect only in some kinds of replay; the others have one in each.
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "balance", "vocabulary", "timeout"), (_LIVE,)),
    **dict.fromkeys(("kv_blocks", *(one.option for _, one in settings.options())), (_ENGINE,)),
    "profile": (_ENGINE, _HOST, _FLEET),
}


def check_effect(
    typed: frozenset[str],
    *,
    simulate: bool,
    host: Path | None,
    fleet: Path | None,
    profile: str | None,
    rate: float | None,
    trace_format: str,
    models: str | None,
    target: list[str] | None,
) -> None:
    """Raise UsageError for a typed option without effect in this kind of replay, or without another option."""
    kind = _HOST if host else _FLEET if fleet else _ENGINE if simulate else _LIVE
    for name in sorted(typed & _KINDS.keys()):
        if kind not in _KINDS[name]:
            raise UsageError(
                f"{_flag(name)} has no effect in a {kind}",
                hint=f"omit it; it applies to a {', or a '.join(_KINDS[name])}",
            )
    without = {
        "cv": (rate is None and "sweep" not in typed, "without --rate", "add --rate"),
        "columns": (
            trace_format in ("mooncake", "azure-functions", "sharegpt", "alpaca"),
            f"with --trace-format {trace_format}",
            "add --trace-format csv",
        ),
        "mapping": (kind in (_LIVE, _ENGINE) and models is None, "without --models", "add --models"),
        "model": (models is not None, "with --models", "omit one of them"),
        "balance": (len(target or ()) == 1, "with one --target", "add a second --target"),
        "max_prompt": (
            kind == _FLEET and profile is None,
            f"in a {_FLEET} without --profile",
            "add --profile",
        ),
    }
    for name, (useless, circumstance, hint) in without.items():
        if name in typed and useless:
            raise UsageError(f"{_flag(name)} has no effect {circumstance}", hint=f"omit it, or {hint}")


def _flag(parameter: str) -> str:
    return "--model-mapping" if parameter == "mapping" else f"--{parameter.replace('_', '-')}"


def check_positive(**given: float | None) -> None:
    """Raise UsageError for an option, named by its keyword, whose value is not above 0. None means not given."""
    for option, value in given.items():
        if value is not None and not value > 0:
            flag = _flag(option)
            raise UsageError(
                f"{flag} {value:g}: expected a number above 0", hint=f"write {flag} 1, or omit it"
            )


def parse_sweep(given: str | None, slo: str, typed: frozenset[str]) -> tuple[float, ...]:
    """Return the rates of --sweep in ascending order; none without it. Raises UsageError."""
    if given is None:
        return ()
    for option in sorted(typed & {"rate", "baseline"}):
        raise UsageError(f"--sweep and --{option} exclude each other", hint="remove one of them")
    if not slo:
        raise UsageError("--sweep needs the limits that a rate must meet", hint="add --slo ttft=2,tpot=0.1")
    try:
        rates = tuple(sorted({float(part) for part in given.split(",")}))
    except ValueError as problem:
        raise UsageError(f"--sweep {given!r}: {problem}", hint="write --sweep 1,2,4") from problem
    check_positive(sweep=rates[0])
    return rates


def parse_models(given: str | None) -> tuple[str, ...]:
    """Return the names in `given`, separated by commas. Raises UsageError for an empty name."""
    names = tuple(given.split(",")) if given is not None else ()
    if not all(name.strip() for name in names):
        raise UsageError(
            f"--models {given!r} contains an empty name", hint="write names separated by commas: --models a,b"
        )
    return names


def parse_slo(given: str) -> dict[str, float]:
    """Return the limits in seconds by metric. Raises UsageError."""
    try:
        return parse(given)
    except ValueError as problem:
        raise UsageError(
            f"--slo: {problem}", hint="write limits in seconds: --slo ttft=2,tpot=0.1"
        ) from problem


def read_baseline(path: Path | None) -> dict[str, Any] | None:
    """Return the result of an earlier replay, None without a path. Raises UsageError if the file contains no result."""
    if path is None:
        return None
    try:
        found = canonical.read(path)
        compare(found, found)
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        hint = "create one: coldstart trace-replay ... --format json -o FILE"
        raise UsageError(f"--baseline {path}: {describe(problem)}", hint=hint) from problem
    return dict(found)
