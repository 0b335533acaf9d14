"""Parse and validate the TOML configuration file of a host, and list the differences between two configurations.

memory = "60GiB"            # total for all models; every field of HostSettings is allowed here
policy = "predictive"
idle_s = 900                # default for models without their own idle_s
on_miss = "fail"            # default for models without their own on_miss

[models.llama2-7b]
memory = "14GiB"            # default on a live host: memory and start_s of the bundle
start_s = 8.0               # seconds from stopped to ready
idle_s = 600                # optional; `pinned = true` keeps the model loaded instead
prewarm = "0 8 * * 1-5"     # optional: cron expression in local time; the model starts at these times
model = "meta-llama/Llama-2-7b-hf"  # model to serve; default: the name of the table
args = ["--max-model-len", "4096"]  # vLLM arguments; default: those of its newest trusted bundle
devices = [0, 1]            # optional: indices of the GPUs that its server may use; set it for all models or for none
aliases = ["llama"]         # additional names; mode, on_miss, revision and untrusted work as in `coldstart serve`

[[models.llama2-7b.tiers]]  # optional, between awake and stopped, in order of increasing penalty_s
name = "asleep-1"
memory = "1GiB"             # default on a live host: what the bundle has measured on a GPU
penalty_s = 0.5
host_memory = "14GiB"

Invariant: an accepted file describes a host that can run, and every error names the file and the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import PARKED
from coldstart.errors import UsageError
from coldstart.host import tables
from coldstart.host.launches import FORKED, Catalogue, Launch
from coldstart.host.policies import create_policy
from coldstart.host.specification import AWAKE, HostSettings, ModelSpec, Tier, stopped
from coldstart.system.devices.parking import find_engine_limit
from coldstart.units import format_memory

_HINT = 'write five fields, such as "0 8 * * 1-5" for 8:00 on weekdays'


def check_cron_expression(given: object) -> str:
    """Check a cron expression, and return it unchanged. Raises UsageError if it is invalid or never matches."""
    if not isinstance(given, str):
        raise UsageError(f"expected a cron expression, found {given!r}", hint=_HINT)
    try:
        find_next_moment(given, time.time())
    except ValueError as error:
        raise UsageError(f"invalid cron expression {given[:80]!r}: {error}", hint=_HINT) from error
    return given


def find_next_moment(expression: str, now: float) -> float:
    """Return the first time after `now` that matches a cron expression, as Unix time in seconds.

    If daylight saving time skips a matching local time, the result is one hour later. If an hour occurs twice, the second
    occurrence is returned only if `now` is after the first one.

    Raises:
        ValueError: The expression is invalid, or does not match any time within the next 50 years.
    """
    from cronsim import CronSim, CronSimError

    if len(expression.split()) != 5:
        raise ValueError(f"expected five fields, found {len(expression.split())}")
    try:
        for moment in CronSim(expression, datetime.fromtimestamp(now)):
            # If a local time occurs twice and the first occurrence has passed, use the second.
            for fold in (0, 1):
                at = moment.replace(fold=fold).timestamp()
                if at > now:
                    return at
    except CronSimError as error:
        raise ValueError(str(error)) from error
    raise ValueError("the expression matches no time within the next 50 years")


@dataclass(frozen=True, slots=True)
class Profile:
    """Estimated memory in bytes and start time in seconds of a model, and the source of these estimates.

    `memory` is the usage of the ready model. `shared` is the part of it that the server shares with the runtime template
    from which it is forked. `tiers` is the usage in each sleeping tier whose usage is known. `least` is the device memory of
    a server with the smallest KV cache, or 0 if its memory cannot be reduced.
    """

    memory: int
    start_s: float
    source: str
    shared: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    least: int = 0


Profiles = Callable[[Launch], Profile]
Adopt = Callable[[Launch], tuple[Arguments, str]]
"""Returns the vLLM arguments for a launch that has none, and the name of the bundle that supplies them, or "" if none does."""


@dataclass(frozen=True)
class TierTable:
    """A tier's table in the host file. If `memory` is None, a profile supplies the value."""

    name: str
    penalty_s: tables.Seconds
    memory: tables.Size | None = None
    host_memory: tables.Size = 0


@dataclass(frozen=True)
class ModelTable(Launch):
    """A model's table in the host file. If `memory` or `start_s` is None, a profile supplies the value."""

    memory: tables.Size | None = None
    start_s: tables.Seconds | None = None
    tiers: tuple[TierTable, ...] = ()
    pinned: bool = False
    idle_s: tables.Seconds | None = None
    prewarm: Annotated[str, check_cron_expression] | None = None


@dataclass(frozen=True, slots=True)
class HostFile:
    """Parsed configuration of a host.

    `notes` are warnings about its settings. `argument_sources` maps each model whose vLLM arguments the file does not set
    to the name of the bundle that supplies them.
    """

    settings: HostSettings
    models: tuple[ModelSpec, ...]
    catalogue: Catalogue
    notes: tuple[str, ...] = ()
    argument_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def crontabs(self) -> dict[str, str]:
        """Return the cron expressions of the models that have scheduled starts, by model name."""
        return {spec.name: spec.prewarm for spec in self.models if spec.prewarm is not None}


def describe_limits(file: HostFile, machine: int | None, template_bytes: int = 0) -> Iterator[str]:
    """Yield a warning if the memory limit exceeds the machine's memory, and one for each model that exceeds the limit.

    Args:
        file: Configuration of the host.
        machine: Memory of the machine, its control group or its devices in bytes, or None if unknown.
        template_bytes: Memory of a runtime template in bytes.
    """
    limit = file.settings.memory
    if machine is not None and limit > machine:
        yield f"the memory limit is {format_memory(limit)}, but this machine has {format_memory(machine)}"
    template = template_bytes if file.settings.runtime_template else 0
    beside = f", of which the runtime template uses {format_memory(template)}" if template else ""
    for model in file.models:
        needed, source = model.tiers[0].memory, model.memory_source
        most = min(limit, file.settings.bytes_per_device * len(model.devices) or limit)
        if needed > most - template:
            yield (
                f"{model.name} needs {format_memory(needed)} ({source}), but the memory limit is {format_memory(most)}"
                f"{beside}: its requests are rejected"
            )


def load(
    path: Path,
    profiles: Profiles | None = None,
    typed: Mapping[str, Any] | None = None,
    adopt: Adopt | None = None,
) -> HostFile:
    """Load a host file. Values in `typed`, which come from the command line, override those in the file, also of a model.

    Raises:
        UsageError: The file cannot be read or is not a valid host configuration.
    """
    table, typed = tables.read_toml(path, "host"), typed or {}
    models = table.get("models", {})
    with tables.prefix_errors(f"host file {path}"):
        for name, more in typed.get("models", {}).items() if isinstance(models, dict) else ():
            models[name] = {**tables.expect_table(models.get(name, {}), f"models.{name}"), **more}
        return parse({**table, **typed, "models": models}, profiles, adopt)


def parse(table: Mapping[str, Any], profiles: Profiles | None = None, adopt: Adopt | None = None) -> HostFile:
    """Parse a host configuration.

    `profiles` supplies the estimates, and `adopt` the vLLM arguments, that the configuration does not set. Both may raise
    other errors.

    Raises:
        UsageError: The content is not a valid host configuration.
    """
    top = dict(table)
    models, defaults = top.pop("models", None), {key: top.pop(key) for key in DEFAULTS if key in top}
    if not isinstance(models, dict) or not models:
        raise UsageError(
            "no model is configured: at least one table [models.NAME] is required",
            hint='add a table [models.NAME], for example with memory = "14GiB" and start_s = 8.0',
        )
    settings = tables.decode(HostSettings, top)
    with tables.prefix_errors("policy"):
        create_policy(settings.policy, {})
    launches = {}
    for name, given in models.items():
        place = f"models.{name}"
        content = {"model": name, **defaults, **tables.expect_table(given, place)}
        launches[name] = tables.decode(ModelTable, content, place, name=name, weights_from=None, gpu_bytes=0)
    missing = [name for name, launch in launches.items() if not launch.devices]
    if missing and len(missing) < len(launches):  # the other models would use memory of an unknown device
        raise UsageError(
            f"models.{missing[0]}: missing key `devices`, which other models set",
            hint="set devices = [0], or a list with a device for each tensor-parallel rank",
        )
    if all(launch.mode not in FORKED for launch in launches.values()):
        settings = replace(settings, runtime_template=False)
    argument_sources = {}
    for name, given in models.items():
        if adopt is not None and "args" not in given:
            arguments, argument_sources[name] = adopt(launches[name])
            launches[name] = replace(launches[name], args=arguments)
    catalogue = Catalogue(launches.values(), settings.default_model)
    specs = tuple(_build_spec(one, profiles, settings.runtime_template) for one in launches.values())
    return HostFile(settings, specs, catalogue, argument_sources=argument_sources)


def _build_spec(model: ModelTable, profiles: Profiles | None, shares: bool) -> ModelSpec:
    """Build the specification of a model. Its profile supplies the values that the file does not set.

    If `shares` is set, the memory that the server shares with a template is not counted.
    """
    given: dict[str, Any] = {
        key: one for key in ("memory", "start_s") if (one := getattr(model, key)) is not None
    }
    if profiles is None or (len(given) == 2 and all(tier.memory is not None for tier in model.tiers)):
        tables.require_keys(given, ("memory", "start_s"), f"models.{model.name}")
        known = Profile(source="file", **given)
    else:
        given |= {} if model.memory is None else {"source": "file", "shared": 0, "least": 0}
        known = replace(profiles(model), **given)
    memory = known.memory - (known.shared if shares else 0)
    return ModelSpec(
        model.name,
        (Tier(AWAKE, memory, 0.0), *_build_tiers(model, known), stopped(known.start_s)),
        model.pinned,
        model.idle_s,
        model.prewarm,
        model.devices,
        known.source,
        known.least,
    )


def _build_tiers(model: ModelTable, known: Profile) -> Iterator[Tier]:
    """Yield the tiers between awake and stopped. Raises UsageError if a tier is impossible or its memory is unknown."""
    place = f"models.{model.name}.tiers"
    for tier in model.tiers:
        if tier.name == PARKED and (limit := find_engine_limit(model.args)):
            raise UsageError(f"{place}: {limit[0]}", hint=limit[1])
        memory = known.tiers.get(tier.name) if tier.memory is None else tier.memory
        if memory is None:
            raise UsageError(
                f"{place}: the memory of {tier.name} is unknown, because no bundle has measured it",
                hint=f"set memory, or run `coldstart materialize {model.model} --force` with its args on a GPU",
            )
        yield Tier(tier.name, memory, tier.penalty_s, tier.host_memory)


DEFAULTS = ("idle_s", "on_miss")
"""Settings at the top level of a host file that are defaults for its models."""
CHANGE_KINDS = ("added", "removed", "changed", "settings")
"""Fields of the document that describes the changes to a host file. Each is a list of names."""


def describe_changes(before: HostFile, after: HostFile) -> dict[str, list[str]]:
    """Compare two configurations.

    Return the names of the models in `after`, of the added, removed and changed models, and of the changed settings.
    """
    old, new = _list_models(before), _list_models(after)
    settings = [field.name for field in fields(after.settings)]
    return {
        "models": list(new),
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "settings": [n for n in settings if getattr(before.settings, n) != getattr(after.settings, n)],
    }


def _list_models(file: HostFile) -> dict[str, tuple[object, object]]:
    return {spec.name: (file.catalogue.launches[spec.name], spec) for spec in file.models}
