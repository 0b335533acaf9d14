"""Shell completion of models, bundle references and key names. If an error occurs, no completions are offered."""

from collections.abc import Iterator

import typer

from coldstart.errors import ColdstartError


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the model aliases, the models of stored bundles and the bundle references that begin with `incomplete`."""
    from coldstart.models.aliases import NAMES

    references = complete_reference(ctx, incomplete)
    names = [name for name in (reference.partition(":")[0] for reference in references) if "/" in name]
    aliases = [name for name in NAMES if name.startswith(incomplete.lower())]
    return list(dict.fromkeys((*aliases, *names, *references)))


def complete_reference(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the references (NAME:vN) of stored bundles that begin with `incomplete`."""
    try:
        return [reference for reference in _list_references(ctx) if reference.startswith(incomplete)]
    except (ColdstartError, OSError, ValueError):
        return []


def complete_trusted_key(incomplete: str) -> list[str]:
    """Return the names of the trusted keys that begin with `incomplete`."""
    from coldstart.system.trust import trusted_keys

    try:
        return [key.name for key in trusted_keys.list_keys() if key.name.startswith(incomplete)]
    except (ColdstartError, OSError, ValueError):
        return []


def _list_references(ctx: typer.Context) -> Iterator[str]:
    # Read only the index, because the user waits: importing the store takes a fifth of the time.
    from coldstart.artifacts import oci
    from coldstart.artifacts.oci_layout import OciLayout

    from coldstart.system.paths import Cache

    for entry in OciLayout(Cache.at(ctx.params.get("cache_dir")).bundles).read_entries():
        if entry.artifact_type == oci.BUNDLE_TYPE and (name := entry.annotations.get(oci.NAME)):
            yield f"{name}:v{entry.listed_version}"
