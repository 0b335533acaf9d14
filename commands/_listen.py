"""Options of commands that accept HTTP clients: address, API keys, access checks and limits."""

from typing import Any

from coldstart.commands._output import Output

from coldstart.host.endpoint import ClientKeys, GatewayEndpoint, GatewayLimits


def create_endpoint(gateway: dict[str, Any], limits: dict[str, Any], out: Output) -> GatewayEndpoint:
    """Create the endpoint of a gateway from the values of its options, and warn about exposed key files.

    Raises:
        UsageError: A value is invalid, or the endpoint would be exposed unintentionally.
    """
    if "client_keys" in gateway:
        gateway["client_keys"] = ClientKeys(gateway["client_keys"])
    for name in ("allow_hosts", "allow_origins"):
        gateway[name] = tuple(gateway.get(name, ()))
    endpoint = GatewayEndpoint(**gateway, limits=GatewayLimits(**limits))
    endpoint.check()
    for warning in endpoint.client_keys.describe_exposed_files() if endpoint.client_keys else ():
        out.warn(warning)
    return endpoint
