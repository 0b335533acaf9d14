"""State file of the fleet: deployments and observations that a restarted controller cannot get from the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical, files
from coldstart.errors import UsageError, describe
from coldstart.fleet.live import wire
from coldstart.fleet.live.wire import ModelDeployment

SCHEMA = 1


class FleetState:
    """Deployments by name, draining servers, and measured link speeds (bytes/s) by server.

    Invariant: the file is written before a change takes effect.

    Without a path nothing is saved. Raises UsageError for a file that cannot be read or is not a fleet state.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.models: dict[str, ModelDeployment] = {}
        self.drained: set[str] = set()
        self.links: dict[str, float] = {}
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            found: Any = canonical.read(path)
            if found["schema"] != SCHEMA:
                raise ValueError(f"schema version {found['schema']}, expected {SCHEMA}")
            models = [wire.thing(one) for one in found["models"]]
            self.drained = {str(name) for name in found["drained"]}
            self.links = {str(name): float(speed) for name, speed in found.get("links", {}).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"cannot read fleet state {path}: {describe(error)}",
                hint="move the file away to start with an empty fleet",
            ) from error
        self.models = {one.spec.name: one for one in models}

    def deploy(self, deployment: ModelDeployment) -> None:
        """Save a deployment. Raises OSError, and then the state is unchanged."""
        before, self.models = self.models, {**self.models, deployment.spec.name: deployment}
        try:
            self._save()
        except OSError:
            self.models = before
            raise

    def remove(self, name: str) -> None:
        """Remove a deployment. Raises OSError."""
        if self.models.pop(name, None) is not None:
            self._save()

    def drain(self, server: str) -> None:
        """Record that the server accepts no new worker. Raises OSError."""
        self.drained.add(server)
        self._save()

    def observe(self, server: str, speed: float) -> None:
        """Record the measured speed of a server's link in bytes/s. Raises OSError."""
        self.links[server] = speed
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        kept = {
            "schema": SCHEMA,
            "models": [wire.document(one) for one in self.models.values()],
            "drained": sorted(self.drained),
            "links": self.links,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(self.path, json.dumps(kept, indent=1).encode(), mode=0o600)
