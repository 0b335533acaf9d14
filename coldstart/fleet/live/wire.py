"""The fleet's events, orders and deployments as JSON, and back: for the state file, for what gateways send, for recordings.

A dataclass is an object whose member `is` names it; what is no member of NAMES is not made. Sequences become tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.fleet import events
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs, Overlap
from coldstart.host.events import Arrived, Ended, Refuse, Tick
from coldstart.host.launches import Launch


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """What is started for a model, and what the fleet decides by."""

    launch: Launch
    spec: FleetModel


NAMES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(events, name) for name in events.__all__ if name not in ("Action", "Event")),
        *(Arrived, Ended, Refuse, Tick),
        *(Costs, FleetModel, FleetSettings, ServerSpec, Launch, ModelDeployment),
    )
}


def document(thing: Any) -> Any:
    """What json.dumps takes."""
    if is_dataclass(thing) and not isinstance(thing, type):
        members = {field.name: document(getattr(thing, field.name)) for field in fields(thing)}
        return {"is": type(thing).__name__, **members}
    if isinstance(thing, Mapping):
        return {"is": "map", "items": [[document(key), document(value)] for key, value in thing.items()]}
    if isinstance(thing, (list, tuple, Arguments)):
        return [document(one) for one in thing]
    return thing


def thing(given: Any) -> Any:
    """What `document` was given. Raises ValueError for what is none, and Usage for members that are no good."""
    if isinstance(given, list):
        return tuple(thing(one) for one in given)
    if not isinstance(given, dict):
        return given
    members = {name: value for name, value in given.items() if name != "is"}
    if given.get("is") == "map":
        return {thing(key): thing(value) for key, value in members["items"]}
    kind = NAMES.get(str(given.get("is")))
    if kind is None:
        raise ValueError(f"{given.get('is')!r} is nothing of the fleet's")
    made = {name: thing(value) for name, value in members.items()}
    if kind is Costs:
        made["overlap"] = Overlap(made["overlap"])
    if kind is Launch:
        made["args"] = Arguments(made["args"])
    try:
        return kind(**made)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
