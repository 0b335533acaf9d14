"""State file of the fleet: deployments and observations that a new process cannot get from the servers.

Link speeds and join times are measured at starts. Only fetches that had the link to themselves measure its speed, which
is that of the slower of link and source. Each measurement has as much weight as all earlier ones together. A measurement
that cannot be saved is used until the process ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from coldstart.artifacts import canonical, files
from coldstart.errors import UsageError, describe
from coldstart.fleet import events
from coldstart.fleet.events import Event
from coldstart.fleet.groups import Deployment
from coldstart.fleet.specification import FleetModel
from coldstart.host.launches import Launch
from coldstart.host.live.log import Log
from coldstart.host.tables import decode_arguments

LEAST_S, LEAST_BYTES = 1.0, 4 << 20
"""Minimum duration and size of a fetch that counts: below, its connections have not reached full speed."""
WEIGHT = 0.5


def joining(before: float | None, seconds: float) -> float:
    """Return the estimated seconds from the largest term to the first token, after a start that took `seconds` for it."""
    found = max(0.0, seconds)
    return found if before is None else before + WEIGHT * (found - before)


def speed(before: float | None, size: int, seconds: float) -> float | None:
    """Return the estimated bytes/s after a fetch of `size` bytes; `before` if the fetch is too short, None if unknown."""
    if seconds < LEAST_S or size < LEAST_BYTES:
        return before
    found = size / seconds
    return found if before is None else before + WEIGHT * (found - before)


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """Launch of a model, and the specification by which the fleet decides about it."""

    launch: Launch
    spec: FleetModel


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: Literal[1] = 1
    models: tuple[ModelDeployment, ...] = ()
    drained: set[str] = set()
    links: dict[str, float] = {}


def encode(thing: Any) -> Any:
    """Return a document of `thing` for json.dumps."""
    return msgspec.to_builtins(thing, str_keys=True)


def decode(given: Any, kind: Any) -> Any:
    """Return the object of a document; `kind` is its class, or a union of classes.

    Raises:
        msgspec.ValidationError: The document is not of this kind; a ValueError.
        UsageError: A value in it is not allowed.
    """
    return msgspec.convert(given, kind, str_keys=True, dec_hook=decode_arguments)


class FleetState:
    """Deployments by name, draining servers, and measured link speeds (bytes/s) by server.

    Invariant: the file is written before a change takes effect.

    Without a path nothing is saved. Raises UsageError for a file that cannot be read or is not a fleet state.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, found = path, _File()
        if path is not None and path.exists():
            try:
                found = decode(canonical.read(path), _File)
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"cannot read fleet state {path}: {describe(error)}",
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

    def observe(self, server: str, speed: float) -> None:
        """Record the measured speed of a server's link in bytes/s. Raises OSError."""
        self.links[server] = speed
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            kept = _File(1, tuple(self.models.values()), self.drained, self.links)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(self.path, json.dumps(encode(kept), indent=1).encode(), mode=0o600)


class Measurements:
    """Measurements of one fleet; `models` are the core's, `emit` sends an event to the core."""

    def __init__(
        self, state: FleetState, models: Mapping[str, Deployment], emit: Callable[[Event], None], log: Log
    ) -> None:
        self._state, self._models, self._emit, self._log = state, models, emit, log

    def record_fetch(self, server: str, size: int, seconds: float) -> None:
        """Record a fetch of `size` bytes that used the server's link alone."""
        before = self._state.links.get(server)
        after = speed(before, size, seconds)
        if after is not None and after != before:
            self._save(lambda: self._state.observe(server, after))
            self.emit_speed(server)

    def record_start(self, name: str, ranks: int, seconds: float) -> None:
        """Record the seconds that a group of `ranks` ranks took to join after its weights were loaded."""
        known = self._state.models.get(name)
        if known is None:
            return
        seen = self._models[name].spec.joins
        joins = {**seen, ranks: joining(seen.get(ranks), seconds)}
        updated = replace(known, spec=replace(known.spec, joins=joins))
        self._save(lambda: self._state.deploy(updated))
        self._emit(events.Deployed(updated.spec))

    def emit_speed(self, server: str) -> None:
        """Send the measured speed of the server's link to the core, if there is one."""
        if (known := self._state.links.get(server)) is not None:
            self._emit(events.Rate(server, known))

    def _save(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._log.write("state not written", reason=error.strerror or str(error))
