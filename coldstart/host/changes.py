"""Differences between two configurations of a host, for the operator who reads the file again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from coldstart.host.configuration import HostFile


def describe_changes(before: HostFile, after: HostFile) -> dict[str, Any]:
    """Return the names of the models that were added, removed or changed, and of the settings with another value."""
    old, new = _list_models(before), _list_models(after)
    return {
        "models": list(new),
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "settings": [
            field.name
            for field in fields(after.settings)
            if getattr(before.settings, field.name) != getattr(after.settings, field.name)
        ],
    }


def _list_models(file: HostFile) -> dict[str, tuple[object, object]]:
    return {spec.name: (file.catalogue.launches[spec.name], spec) for spec in file.models}
