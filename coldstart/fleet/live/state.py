"""State file of the fleet: deployments and observations that a new process cannot get from the servers.

Link speeds and join times are measured at starts. Only fetches that had the link to themselves measure its speed, which
is that of the slower of link and source. Each measurement has as much weight as all earlier ones together. A measurement
that cannot be saved is used until the process ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from coldstart.artifacts import canonical, files
from coldstart.errors import UsageError, describe_reason
from coldstart.fleet.specification import FleetModel
from coldstart.host.launches import Launch
from coldstart.host.live.log import Log
from coldstart.host.tables import decode_arguments

MIN_FETCH_S, MIN_FETCH_BYTES = 1.0, 4 << 20
"""Minimum duration and size of a fetch that counts: below, its connections have not reached full speed."""
NEW_SAMPLE_WEIGHT = 0.5


def _update_average(before: float | None, found: float) -> float:
    return found if before is None else before + NEW_SAMPLE_WEIGHT * (found - before)


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """Launch of a model, and the specification by which the fleet decides about it."""

    launch: Launch
    spec: FleetModel


class _StateFile(msgspec.Struct, forbid_unknown_fields=True):
    schema: Literal[1] = 1
    models: tuple[ModelDeployment, ...] = ()
    drained: set[str] = set()
    links: dict[str, float] = {}


def encode(thing: Any) -> Any:
    """Return a document of `thing` for json.dumps."""
    return msgspec.to_builtins(thing, str_keys=True)


def decode(given: Any, kind: Any) -> Any:
    """Decode a document into an object of the type `kind`: a class, or a union of classes.

    Raises:
        msgspec.ValidationError: The document is not of this kind; a ValueError.
        UsageError: A value in it is not allowed.
    """
    return msgspec.convert(given, kind, str_keys=True, dec_hook=decode_arguments)


class FleetState:
    """Deployments by name, draining servers, and measured link speeds (bytes/s) by server.

    Invariant: the file is written before a change takes effect.

    Without a path nothing is saved. Raises UsageError for a file that cannot be read or is not a fleet state. `log` receives
    that a measurement could not be saved.
    """

    def __init__(self, path: Path | None, log: Log | None = None) -> None:
        self.path, self.log, found = path, log or Log(quiet=True), _StateFile()
        if path is not None and path.exists():
            try:
                found = decode(canonical.read_json(path), _StateFile)
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"cannot read fleet state {path}: {describe_reason(error)}",
                    hint="move the file away to start with an empty fleet",
                ) from error
        self.models: Mapping[str, ModelDeployment] = {one.spec.name: one for one in found.models}
        self.drained, self.links = found.drained, found.links

    def deploy(self, deployment: ModelDeployment) -> None:
        """Save a deployment. Raises OSError, and then the models are unchanged."""
        self._replace({**self.models, deployment.spec.name: deployment})

    def remove(self, name: str) -> None:
        """Remove a deployment. Raises OSError, and then the models are unchanged."""
        self._replace({known: one for known, one in self.models.items() if known != name})

    def _replace(self, models: Mapping[str, ModelDeployment]) -> None:
        before, self.models = self.models, models
        try:
            self._save()
        except OSError:
            self.models = before
            raise

    def drain(self, server: str) -> None:
        """Record that the server accepts no new worker. Raises OSError."""
        self.drained.add(server)
        self._save()

    def record_fetch(self, server: str, size: int, seconds: float) -> float | None:
        """Record a fetch of `size` bytes that used the server's link alone; return the speed of the link in bytes/s.

        None: the fetch is too short.
        """
        if seconds < MIN_FETCH_S or size < MIN_FETCH_BYTES:
            return None
        self.links[server] = _update_average(self.links.get(server), size / seconds)
        self._try_to_save()
        return self.links[server]

    def record_join_time(self, name: str, ranks: int, seconds: float) -> FleetModel | None:
        """Record the seconds that a group of `ranks` ranks took to join after its weights were loaded.

        Returns the model with this measurement, None if it is not deployed.
        """
        known = self.models.get(name)
        if known is None:
            return None
        joins = known.spec.joins
        spec = replace(known.spec, joins={**joins, ranks: _update_average(joins.get(ranks), max(0.0, seconds))})
        self.models = {**self.models, name: replace(known, spec=spec)}
        self._try_to_save()
        return spec

    def record_runtime_time(self, name: str, seconds: float) -> FleetModel | None:
        """Record the seconds that a worker with local weights took until they were loaded, whatever the start mode.

        Returns the model with this measurement, None if it is not deployed.
        """
        known = self.models.get(name)
        if known is None:
            return None
        costs = known.spec.costs
        # What the container and the device context take is part of the measurement.
        fixed_s = costs.container_s + costs.context_s
        library_s = _update_average(costs.library_s, max(0.0, seconds - fixed_s))
        spec = replace(known.spec, costs=replace(costs, library_s=library_s))
        self.models = {**self.models, name: replace(known, spec=spec)}
        self._try_to_save()
        return spec

    def _try_to_save(self) -> None:
        try:
            self._save()
        except OSError as error:
            self.log.write("state not written", reason=error.strerror or str(error))

    def _save(self) -> None:
        if self.path is not None:
            kept = _StateFile(1, tuple(self.models.values()), self.drained, self.links)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(self.path, json.dumps(encode(kept), indent=1).encode(), mode=0o600)
