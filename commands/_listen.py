"""Options of commands that listen for clients: address, key, checks and limits."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.commands._declared import declare_settings, list_parameters, take_settings
from coldstart.commands._output import Output

from coldstart.host.endpoint import ClientKeys, GatewayEndpoint, GatewayLimits
from coldstart.scheduling.declaration import list_settings


def _endpoint(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="Port to listen on; 0 selects a free port."
        ),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="API key that every client must send; default: none."),
    ] = None,
    client_keys: Annotated[
        Path | None,
        typer.Option(
            "--client-keys",
            metavar="FILE",
            help="TOML file of named API keys with their models; read again when it changes; default: none.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines to connect without an API key.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Host name by which clients without a key may address the gateway, beside its address; * for any."
            " Repeatable.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Origin of a web page that may use the gateway, such as https://chat.example.com. Repeatable.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", metavar="FILE", help="PEM certificate chain to serve HTTPS with; default: HTTP."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="PEM private key of --tls-cert; default: HTTP."),
    ] = None,
) -> None: ...


def list_options() -> list[inspect.Parameter]:
    """Return the options of an endpoint, its limits included."""
    return [*list_parameters(_endpoint), *declare_settings(GatewayLimits(), list_settings(GatewayLimits))]


def create_endpoint(given: dict[str, Any], out: Output) -> GatewayEndpoint:
    """Remove the options of an endpoint from `given`, warn about exposed key files, and return the endpoint.

    Raises UsageError.
    """
    endpoint = GatewayEndpoint(
        host=given.pop("host"),
        port=given.pop("port"),
        api_key=given.pop("api_key"),
        client_keys=None if (keys := given.pop("client_keys")) is None else ClientKeys(keys),
        insecure=given.pop("insecure"),
        allow_hosts=tuple(given.pop("allow_host") or ()),
        allow_origins=tuple(given.pop("allow_origin") or ()),
        tls_cert=given.pop("tls_cert"),
        tls_key=given.pop("tls_key"),
        limits=GatewayLimits(**take_settings(GatewayLimits, given)),
    )
    endpoint.check()
    for note in endpoint.client_keys.describe_exposed_files() if endpoint.client_keys else ():
        out.warn(note)
    return endpoint
