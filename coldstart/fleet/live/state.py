"""State file of a fleet: its deployments, and measurements that a new gateway cannot get from the servers.

Link speeds and join times are measured during starts. A link speed is measured only while a single fetch uses the link. It is
the speed of the slower of the link and the source. A new measurement weighs as much as all earlier measurements together. A
measurement that cannot be saved remains in use until the process exits.
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
"""Minimum duration and size of a measured fetch. The connection of a shorter fetch does not reach full speed."""
NEW_SAMPLE_WEIGHT = 0.5


def update_average(before: float | None, found: float) -> float:
    """Return the average of earlier measurements, or None if there are none, and a new one."""
    return found if before is None else before + NEW_SAMPLE_WEIGHT * (found - before)


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """The launch of a model, and its specification for the fleet's scheduling decisions."""

    launch: Launch
    spec: FleetModel


class _StateFile(msgspec.Struct, forbid_unknown_fields=True):
    schema: Literal[1] = 1
    models: tuple[ModelDeployment, ...] = ()
    drained: set[str] = set()
    links: dict[str, float] = {}


def encode(value: Any) -> Any:
    """Convert an object to a document that `json.dumps` accepts."""
    return msgspec.to_builtins(value, str_keys=True)


def decode(document: Any, kind: Any) -> Any:
    """Convert a document to an object of type `kind`, which is a class or a union of classes.

    Raises:
        msgspec.ValidationError: The document has a different structure. This is a subclass of ValueError.
        UsageError: A value in the document is not allowed.
    """
    return msgspec.convert(document, kind, str_keys=True, dec_hook=decode_arguments)


class FleetState:
    """Saved state of a fleet: deployments by name, drained servers, and measured link speeds in bytes per second by server.

    Invariant: the file is written before a change to a deployment takes effect. If `path` is None, nothing is saved.
    Measurements that cannot be saved are reported to `log`. Raises UsageError if the file cannot be read or is not the
    state of a fleet.
    """

    def __init__(self, path: Path | None, log: Log | None = None) -> None:
        self.path, self.log, found = path, log or Log(quiet=True), _StateFile()
        if path is not None and path.exists():
            try:
                found = decode(canonical.read_json(path), _StateFile)
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"cannot read the fleet state in {path}: {describe_reason(error)}",
                    hint="rename or remove this file to start with an empty fleet",
                ) from error
        self.models: Mapping[str, ModelDeployment] = {one.spec.name: one for one in found.models}
        self.drained, self.links = found.drained, found.links

    def replace_models(self, models: Mapping[str, ModelDeployment]) -> None:
        """Save these deployments instead of the earlier ones. Raises OSError without a change if the file cannot be written."""
        self._save(models, self.drained)
        self.models = models

    def drain(self, server: str) -> None:
        """Record that a server accepts no new workers. Raises OSError without a change if the file cannot be written."""
        drained = {*self.drained, server}
        self._save(self.models, drained)
        self.drained = drained

    def record_fetch(self, server: str, size: int, seconds: float) -> float | None:
        """Record a fetch of `size` bytes in `seconds` seconds that had the server's link to itself.

        Return the average link speed in bytes per second, or None if the fetch was too short or too small to measure it.
        """
        if seconds < MIN_FETCH_S or size < MIN_FETCH_BYTES:
            return None
        self.links[server] = update_average(self.links.get(server), size / seconds)
        self._try_to_save()
        return self.links[server]

    def correct(self, spec: FleetModel) -> None:
        """Replace the specification of a deployed model by one with times that a start has measured."""
        self.models = {**self.models, spec.name: replace(self.models[spec.name], spec=spec)}
        self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save(self.models, self.drained)
        except OSError as error:
            self.log.write("state not written", reason=error.strerror or str(error))

    def _save(self, models: Mapping[str, ModelDeployment], drained: set[str]) -> None:
        if self.path is not None:
            kept = _StateFile(1, tuple(models.values()), drained, self.links)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(self.path, json.dumps(encode(kept), indent=1).encode(), mode=0o600)
