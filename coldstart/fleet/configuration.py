"""The fleet's one TOML file.

    placement = "pipeline"        # every member of FleetSettings may stand here

    [servers.a10]
    count = 2                     # a10-0 and a10-1; without it one, called a10
    devices = 4
    memory = "24GB"               # of each device
    network = "6.7GB"             # a second, shared by all that starts there
    load = "12GB"                 # a second, from host memory to a device
    host_memory = "500GB"         # optional: weights kept there

    [models.llama2-7b]            # every member of FleetModel and of Costs may stand here, and `count`
    size = "13.5GB"
    memory = "18GB"
    container_s = 2.0
    library_s = 4.0
    prefill_s = 0.5
    decode_s = 0.04
    ttft_s = 7.5                  # optional limits
    tpot_s = 0.2

Invariant: a file that is accepted describes a fleet that can be simulated; every complaint names the file and the member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from coldstart.errors import UsageError
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs, Overlap
from coldstart.host.tables import parse_at, parse_seconds, read_toml, reject_unknown_keys, require_keys
from coldstart.units import parse_size

SIZES = ("memory", "network", "load", "host_memory", "size")
NOT_WRITTEN = ("name", "costs", "shares", "joins")
_KINDS: Mapping[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "bool": (bool, "true or false"),
    "str": (str, "text in quotes"),
}


@dataclass(frozen=True, slots=True)
class FleetFile:
    settings: FleetSettings
    servers: tuple[ServerSpec, ...]
    models: tuple[FleetModel, ...]


def load(path: Path) -> FleetFile:
    """Raises UsageError for a file that cannot be read or describes no fleet."""
    table = read_toml(path, "fleet")
    try:
        return parse(table)
    except UsageError as problem:
        raise UsageError(f"fleet file {path}: {problem}", hint=problem.hint) from problem


def parse(table: Mapping[str, Any]) -> FleetFile:
    """From the file's content. Raises UsageError."""
    top = dict(table)
    servers, models = (_tables(top.pop(kind, {}), kind) for kind in ("servers", "models"))
    settings = FleetSettings(**_members("the fleet", top, FleetSettings, ()))
    found = FleetFile(
        settings,
        tuple(server for name, given in servers.items() for server in _servers(name, given)),
        tuple(model for name, given in models.items() for model in _models(name, given)),
    )
    _fits(found)
    return found


def _tables(given: Any, kind: str) -> dict[str, dict[str, Any]]:
    if not isinstance(given, dict) or not given or not all(isinstance(one, dict) for one in given.values()):
        raise UsageError(f"no [{kind}.NAME]", hint=f"write [{kind}.NAME] with its members below")
    return given


def _servers(name: str, given: dict[str, Any]) -> Iterator[ServerSpec]:
    what = f"servers.{name}"
    members = _members(what, given, ServerSpec, ("memory", "network", "load"))
    for one in _names(what, name, given):
        yield ServerSpec(one, **members)


def _models(name: str, given: dict[str, Any]) -> Iterator[FleetModel]:
    what = f"models.{name}"
    names = {field.name for field in fields(Costs)}
    costs = Costs(**_members(what, {k: v for k, v in given.items() if k in names}, Costs, ()))
    rest = {member: value for member, value in given.items() if member not in names}
    members = _members(what, rest, FleetModel, ("size", "memory"))
    for one in _names(what, name, given):
        yield FleetModel(one, costs=costs, **members)


def _names(what: str, name: str, given: Mapping[str, Any]) -> list[str]:
    count = given.get("count")
    if count is None:
        return [name]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"{what}: count = {count!r} is no number from 1", hint="write count = 2")
    return [f"{name}-{number}" for number in range(count)]


def _members(what: str, given: dict[str, Any], kind: type, wanted: tuple[str, ...]) -> dict[str, Any]:
    """The table's members as `kind` takes them; `count` is nobody's."""
    own = {field.name: field for field in fields(kind) if field.name not in NOT_WRITTEN}
    table = {name: value for name, value in given.items() if name != "count" or kind is FleetSettings}
    reject_unknown_keys(table, own.keys(), what)
    require_keys(table, wanted, what)
    return {name: _value(what, own[name], value) for name, value in table.items()}


def _value(what: str, field: Field[Any], given: Any) -> Any:
    where = f"{what}.{field.name}"
    if field.name in SIZES:
        return parse_at(where, parse_size, given)
    if field.name.endswith("_s"):
        return parse_at(where, parse_seconds, given)
    if field.name == "overlap":
        if given not in tuple(Overlap):
            raise UsageError(f"{where} = {given!r}", hint=f"one of {', '.join(Overlap)}")
        return Overlap(given)
    kind, example = _KINDS[str(field.type)]
    if type(given) is not kind:
        raise UsageError(f"{where} = {given!r} is not of the kind {kind.__name__}", hint=f"write {example}")
    return given


def _fits(file: FleetFile) -> None:
    largest = max(server.memory for server in file.servers)
    for model in file.models:
        if model.memory > largest:
            hint = "name a server with a larger device, or split the model: several devices for a worker are not supported"
            raise UsageError(
                f"models.{model.name} needs {model.memory} bytes, the largest device has {largest}", hint=hint
            )
