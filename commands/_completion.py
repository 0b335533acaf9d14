"""Shell completion of models, bundle references and names. A failure completes nothing: a shell shows no errors."""

from collections.abc import Iterator

import typer

from coldstart.errors import ColdstartError

# The keys of `coldstart.host.policies.POLICIES`, whose import would take longer than a shell should wait.
POLICIES = ("lru", "iam", "predictive")
# Longest time in seconds that a running host has to answer.
_ANSWER_S = 0.2


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the models known without the hub, and the references of bundles, which begin with `incomplete`."""
    from coldstart.models.aliases import NAMES

    references = complete_reference(ctx, incomplete)
    names = [name for name in (one.partition(":")[0] for one in references) if "/" in name]
    known = [name for name in NAMES if name.startswith(incomplete.lower())]
    return list(dict.fromkeys((*known, *names, *references)))


def complete_reference(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the references of bundles that begin with `incomplete`, as NAME:vN."""
    try:
        return [one for one in _list_references(ctx) if one.startswith(incomplete)]
    except (ColdstartError, OSError, ValueError):
        return []


def complete_host_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the running host, or those of the store if it does not answer at once."""
    names = _list_host_models(str(ctx.params.get("url") or ""), ctx.params.get("api_key"))
    if names is None:
        return complete_model(ctx, incomplete)
    return [name for name in names if name.startswith(incomplete)]


def _list_host_models(url: str, key: str | None) -> list[str] | None:
    import json
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    place = urlsplit(url)
    if place.scheme != "http":
        return None
    host = HTTPConnection(place.netloc, timeout=_ANSWER_S)
    try:
        host.request(
            "GET", f"{place.path}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        return [str(model["id"]) for model in json.load(host.getresponse())["data"]]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        host.close()


def complete_policy(incomplete: str) -> list[str]:
    """Return the eviction policies that begin with `incomplete`."""
    return [name for name in POLICIES if name.startswith(incomplete)]


def complete_modes(incomplete: str) -> list[str]:
    """Return a list of start modes, separated by commas, with each mode that completes its last name."""
    from coldstart.bench import run_order

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in run_order.MODES if name.startswith(last)]


def complete_mapping(incomplete: str) -> list[str]:
    """Return the assignments of rows to models that begin with `incomplete`."""
    return [name for name in ("round-robin", "zipf", "column") if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Return the names of the trusted keys that begin with `incomplete`."""
    from coldstart.system.trust import trusted_keys

    try:
        return [key.name for key in trusted_keys.listed() if key.name.startswith(incomplete)]
    except (ColdstartError, OSError, ValueError):
        return []


def _list_references(ctx: typer.Context) -> Iterator[str]:
    # A shell waits: the import of a whole store would take a fifth of the time.
    from coldstart.artifacts import oci
    from coldstart.artifacts.oci_layout import OciLayout

    from coldstart.system.paths import Cache

    for entry in OciLayout(Cache.at(ctx.params.get("cache_dir")).bundles).entries():
        if entry.artifact_type == oci.BUNDLE_TYPE and (name := entry.annotations.get(oci.NAME)):
            yield f"{name}:v{entry.version}"
