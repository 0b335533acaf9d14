"""Signed bundles of one model with the arguments that their materialization recorded."""

from collections.abc import Sequence
from dataclasses import replace

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import KV, provenance

from coldstart.contract.arguments import Arguments
from coldstart.models import keys, resolution
from coldstart.system import paths
from coldstart.system.paths import Cache


def publish_recorded(
    model: str, arguments: Sequence[str], *, created: str = "2026-01-01T00:00:00Z", signed: bool = True
) -> Bundle:
    """Publish a bundle of `model` on this machine to the default store."""
    resolved = resolution.resolve(model)
    key = keys.compose(resolved, Arguments(arguments))
    with Store(Cache.at().bundles).open_draft(key) as draft:
        draft.add_json("kv", KV)
        made = replace(provenance(resolved.name), arguments=tuple(arguments), created=created)
        return draft.publish(made, signer=sign.load_host_key(paths.state_dir()) if signed else None)
