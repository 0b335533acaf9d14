"""Parse the fleet's TOML file.

most_ranks = 4                # every member of FleetSettings is allowed here

[servers.a10]
count = 2                     # servers a10-0 and a10-1; without it one, named a10
devices = 4
memory = "24GB"               # of each device
network = "6.7GB"             # per second, shared by all starts on the server
load = "12GB"                 # per second, from host memory to a device

[models.llama2-7b]            # every member of FleetModel and of Costs is allowed here, and `count`
size = "13.5GB"
memory = "18GB"
container_s = 2.0
library_s = 4.0
prefill_s = 0.5
decode_s = 0.04
ttft_s = 7.5                  # optional limits
tpot_s = 0.2

Invariant: an accepted file describes a fleet that can be simulated; every error names the file and the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coldstart.errors import UsageError
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs
from coldstart.host.tables import decode, read_toml


@dataclass(frozen=True, slots=True)
class FleetFile:
    settings: FleetSettings
    servers: tuple[ServerSpec, ...]
    models: tuple[FleetModel, ...]


def load(path: Path) -> FleetFile:
    """Load a fleet file. Raises UsageError if it cannot be read or is not a valid fleet configuration."""
    table = read_toml(path, "fleet")
    try:
        return parse(table)
    except UsageError as problem:
        raise UsageError(f"fleet file {path}: {problem}", hint=problem.hint) from problem


def parse(table: Mapping[str, Any]) -> FleetFile:
    """Parse the content of a fleet file. Raises UsageError."""
    top = dict(table)
    servers, models = (_tables(top.pop(kind, {}), kind) for kind in ("servers", "models"))
    settings = decode(FleetSettings, top)
    found = FleetFile(
        settings,
        tuple(server for name, given in servers.items() for server in _servers(name, given)),
        tuple(model for name, given in models.items() for model in _models(name, given)),
    )
    _fits(found)
    return found


def _tables(given: Any, kind: str) -> dict[str, dict[str, Any]]:
    if not isinstance(given, dict) or not given or not all(isinstance(one, dict) for one in given.values()):
        raise UsageError(
            f"no {kind}: the table [{kind}.NAME] is missing",
            hint=f"write [{kind}.NAME] with its members below",
        )
    return given


def _servers(name: str, given: dict[str, Any]) -> Iterator[ServerSpec]:
    place, table = f"servers.{name}", dict(given)
    for one in _names(place, name, table.pop("count", None)):
        yield decode(ServerSpec, table, place, name=one)


def _models(name: str, given: dict[str, Any]) -> Iterator[FleetModel]:
    place, table = f"models.{name}", dict(given)
    names = _names(place, name, table.pop("count", None))
    own = {field.name for field in fields(Costs)}
    costs = decode(Costs, {key: table.pop(key) for key in own & table.keys()}, place)
    for one in names:
        yield decode(FleetModel, table, place, name=one, costs=costs, shares={}, joins={})


def _names(place: str, name: str, count: object) -> list[str]:
    if count is None:
        return [name]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"{place}: count: expected an integer of 1 or more, found {count!r}", hint="write count = 2"
        )
    return [f"{name}-{number}" for number in range(count)]


def _fits(file: FleetFile) -> None:
    largest = max(server.memory for server in file.servers)
    for model in file.models:
        if model.memory > largest:
            hint = "use a server with a larger GPU, or split the model: several devices for a worker are not supported"
            raise UsageError(
                f"models.{model.name} needs {model.memory} bytes, the largest device has {largest}", hint=hint
            )
