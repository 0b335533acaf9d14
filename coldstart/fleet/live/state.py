"""What is wanted of the fleet, in one file: all that a controller which starts again cannot ask the servers for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.errors import UsageError
from coldstart.fleet.live import wire
from coldstart.fleet.live.wire import ModelDeployment

SCHEMA = 1


class FleetState:
    """Deployments by name, the servers that take nothing new, links' observed speeds (bytes/s) by server.

    Invariant: the file is written before a change is obeyed.

    Without a path nothing is kept. Raises UsageError for a file that is not ours or cannot be read.
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
            found: Any = json.loads(path.read_bytes())
            if found["schema"] != SCHEMA:
                raise ValueError(f"schema {found['schema']}")
            models = [wire.thing(one) for one in found["models"]]
            self.drained = {str(name) for name in found["drained"]}
            self.links = {str(name): float(speed) for name, speed in found.get("links", {}).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the fleet's state {path} cannot be read: {error}", hint="move it away to begin anew"
            ) from error
        self.models = {one.spec.name: one for one in models}

    def deploy(self, deployment: ModelDeployment) -> None:
        """Keep it. Raises OSError: then it is as before."""
        before, self.models = self.models, {**self.models, deployment.spec.name: deployment}
        try:
            self._save()
        except OSError:
            self.models = before
            raise

    def remove(self, name: str) -> None:
        """Forget it. Raises OSError."""
        if self.models.pop(name, None) is not None:
            self._save()

    def drain(self, server: str) -> None:
        """Keep in mind that it takes nothing new. Raises OSError."""
        self.drained.add(server)
        self._save()

    def observe(self, server: str, speed: float) -> None:
        """Keep in mind how fast its link was. Raises OSError."""
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
