"""Options of commands that accept HTTP clients: address, API keys, access checks and limits."""

import inspect
from typing import Any

from coldstart.commands._declared import declare_settings, take_settings
from coldstart.commands._output import Output

from coldstart.host.endpoint import ClientKeys, GatewayEndpoint, GatewayLimits
from coldstart.scheduling.declaration import list_settings


def list_options() -> list[inspect.Parameter]:
    """Return the command-line options of a gateway endpoint and its limits."""
    defaults = (GatewayEndpoint(), GatewayLimits())
    return [option for default in defaults for option in declare_settings(default, list_settings(default))]


def create_endpoint(option_values: dict[str, Any], out: Output) -> GatewayEndpoint:
    """Create the endpoint from its options, which are removed from `option_values`, and warn about exposed key files.

    Raises:
        UsageError: A value is invalid, or the endpoint would be exposed unintentionally.
    """
    values = take_settings(GatewayEndpoint, option_values)
    if "client_keys" in values:
        values["client_keys"] = ClientKeys(values["client_keys"])
    for name in ("allow_hosts", "allow_origins"):
        values[name] = tuple(values.get(name, ()))
    endpoint = GatewayEndpoint(**values, limits=GatewayLimits(**take_settings(GatewayLimits, option_values)))
    endpoint.check()
    for warning in endpoint.client_keys.describe_exposed_files() if endpoint.client_keys else ():
        out.warn(warning)
    return endpoint
