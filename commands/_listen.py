"""Options of commands that listen for clients: address, key, checks and limits."""

import inspect
from typing import Any

from coldstart.commands._declared import declare_settings, take_settings
from coldstart.commands._output import Output

from coldstart.host.endpoint import ClientKeys, GatewayEndpoint, GatewayLimits
from coldstart.scheduling.declaration import list_settings


def list_options() -> list[inspect.Parameter]:
    """Return the options of an endpoint, its limits included."""
    parts = (GatewayEndpoint(), GatewayLimits())
    return [option for part in parts for option in declare_settings(part, list_settings(part))]


def create_endpoint(given: dict[str, Any], out: Output) -> GatewayEndpoint:
    """Remove the options of an endpoint from `given`, warn about exposed key files, and return the endpoint.

    Raises UsageError.
    """
    taken = take_settings(GatewayEndpoint, given)
    if "client_keys" in taken:
        taken["client_keys"] = ClientKeys(taken["client_keys"])
    for name in ("allow_hosts", "allow_origins"):
        taken[name] = tuple(taken.get(name, ()))
    endpoint = GatewayEndpoint(**taken, limits=GatewayLimits(**take_settings(GatewayLimits, given)))
    endpoint.check()
    for note in endpoint.client_keys.describe_exposed_files() if endpoint.client_keys else ():
        out.warn(note)
    return endpoint
