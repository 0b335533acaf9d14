"""Differences between two configurations of a host, for the operator who reads the files again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coldstart.host.client_keys import ClientKey, describe_client_changes
from coldstart.host.configuration import HostFile

KINDS = ("added", "removed", "changed", "settings")
"""Members of the changes of a host file, each a list of names."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Models, settings and clients that a host has read."""

    file: HostFile
    clients: tuple[ClientKey, ...] = ()


def describe_changes(before: Configuration, after: Configuration) -> dict[str, Any]:
    """Return the names of the models and clients that were added, removed or changed, and of the settings that differ."""
    old, new = _list_models(before.file), _list_models(after.file)
    return {
        "models": list(new),
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "settings": [
            field.name
            for field in fields(after.file.settings)
            if getattr(before.file.settings, field.name) != getattr(after.file.settings, field.name)
        ],
        "clients": describe_client_changes(before.clients, after.clients),
    }


def has_changes(found: Mapping[str, Any]) -> bool:
    """Return whether `describe_changes` has found a difference."""
    return any(found[kind] for kind in KINDS) or any(found["clients"].values())


def _list_models(file: HostFile) -> dict[str, tuple[object, object]]:
    return {spec.name: (file.catalogue.launches[spec.name], spec) for spec in file.models}
