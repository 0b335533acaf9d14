"""Serve models on a Ray cluster of servers behind one HTTP endpoint."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._listen import create_endpoint
from coldstart.commands._options import Common, Model, OnMissing, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import escape_line, format_bytes

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.fleet.specification import DeployOptions, FleetSettings, ServerSpec
from coldstart.host.endpoint import GatewayEndpoint, GatewayLimits
from coldstart.host.tables import decode
from coldstart.units import require_unit

if TYPE_CHECKING:
    from coldstart.commands._client import ServerClient

    from coldstart.fleet.live.local_state import LocalFleet

# This module must not import Ray, which is slow.
app = group(__doc__)
HEADER = "x-coldstart-admin-key"
_URL = typer.Option(
    "--url", metavar="URL", help="URL of the gateway; default: this user's fleet on this machine."
)
_KEY = typer.Option(
    "--admin-key", metavar="KEY", help="Admin key of the fleet; default: the saved key of this user's fleet."
)
Url = Annotated[str | None, _URL]
Key = Annotated[str | None, _KEY]
NewKey = Annotated[
    str | None,
    typer.Option("--admin-key", metavar="KEY", help="Admin key of the fleet; default: a new random key."),
]


@app.command()
@declare(
    settings=FleetSettings(max_held=1024),
    server=ServerSpec,
    gateway=GatewayEndpoint(),
    limits=GatewayLimits(),
)
def up(
    common: Common,
    settings: dict[str, Any],
    server: dict[str, Any],
    gateway: dict[str, Any],
    limits: dict[str, Any],
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Address of an existing Ray cluster; default: start a new cluster on this machine.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="File that preserves the deployments when the gateway restarts; default: none.",
        ),
    ] = None,
    admin_key: NewKey = None,
) -> None:
    """Run the gateway of a fleet. It uses a new or an existing Ray cluster."""
    from coldstart.fleet.live import ray_process

    endpoint = create_endpoint(gateway, limits, common.out)
    ray_process.require_ray()
    spec = _create_server_spec(server) if "memory" in server else None
    if address is not None and spec is not None:
        raise UsageError(
            "--memory applies to a Ray cluster that this command starts, not to the one at --address",
            hint="run `coldstart fleet join ADDRESS --memory 60GiB`",
        )

    from coldstart.fleet.live.run import FleetUp
    from coldstart.host.live.log import Log

    def announce(local: "LocalFleet") -> None:
        document = {"url": local.url, "ray": local.ray}
        common.out.print_result(document, f"{local.url}  gateway of a fleet, Ray at {local.ray}")

    fleet = FleetUp(
        common.cache,
        FleetSettings(**settings),
        Log(quiet=common.out.quiet),
        announce,
        state=state.absolute() if state else None,
        server=spec,
        address=address,
        endpoint=endpoint,
        admin_key=admin_key,
        offline=common.offline,
    )
    raise typer.Exit(fleet.run())


@app.command()
@declare(server=ServerSpec)
def join(
    common: Common,
    server: dict[str, Any],
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]",
            help="Address of the fleet's Ray cluster; default: the fleet of this user on this machine.",
        ),
    ] = None,
) -> None:
    """Add this machine to a fleet as a server."""
    from coldstart.fleet.live import local_state, ray_process
    from coldstart.host.live.log import Log

    ray_process.require_ray()
    if "memory" not in server:
        raise UsageError(
            "--memory is required: it sets the memory for models on each GPU", hint="use --memory 60GiB"
        )
    spec = _create_server_spec(server)
    local = local_state.read_fleet() if address else local_state.require_fleet()
    env = {str(environment.CACHE_DIR): str(common.cache.root)}
    if local is not None and local.token and local.ray == (address or local.ray):
        env["RAY_AUTH_TOKEN"] = local.token
    command = ray_process.build_node_command(spec, f"--address={address or local_state.require_fleet().ray}")
    ray_process.run_joined_node(command, env, Log(quiet=common.out.quiet))


def _create_server_spec(options: dict[str, Any]) -> ServerSpec:
    memory = options["memory"]
    require_unit(memory, "--memory", hint=f"use --memory {memory.strip()}MiB")
    return decode(ServerSpec, options, name="here")


@app.command()
@declare(takes_vllm_args=True, options=DeployOptions())
def deploy(
    common: Common,
    model: Model,
    options: dict[str, Any],
    on_miss: OnMissing = "fail",
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Deploy a model to a fleet. Arguments after -- go to vLLM."""
    from coldstart.fleet.live import deployments, state
    from coldstart.host.launches import Launch

    given = DeployOptions(**options)
    launch = Launch(
        given.name or model, model, common.vllm_args, on_miss=on_miss, weights_from=given.weights_from
    )
    deployment = deployments.build_deployment(launch, given, common.cache, offline=common.offline)
    _send_order(common, url, admin_key, "deploy", deployment=state.encode(deployment))
    if isfinite(deployment.spec.ttft_s):
        for ranks, reason in deployment.spec.unavailable.items():
            common.out.print_note(f"no start will use {ranks} servers: {reason}")
    common.out.print_success(f"Deployed {deployment.spec.name}", then="coldstart fleet status")


@app.command()
@declare()
def status(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """Show the status of a fleet. The output lists servers, models and workers."""
    document = _connect(common, url, admin_key).call("/fleet/status", required_fields={"gateway", "models"})
    common.out.print_result(document, lambda: render(document))


@app.command()
@declare()
def scale(
    common: Common,
    model: str,
    min: Annotated[int, typer.Option("--min", metavar="N", help="Minimum number of workers.")],
    max: Annotated[int, typer.Option("--max", metavar="N", help="Maximum number of workers.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Set the number of workers of a model."""
    _send_order(common, url, admin_key, "scale", model=model, least=min, most=max)


@app.command()
@declare()
def drain(
    common: Common,
    server: Annotated[
        str,
        typer.Argument(metavar="SERVER", help="Name of the server, as shown by `coldstart fleet status`."),
    ],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Drain a server. Its streams move to other servers, its workers stop after their last request, and none start."""
    _send_order(common, url, admin_key, "drain", server=server)


@app.command()
@declare()
def remove(common: Common, model: str, url: Url = None, admin_key: Key = None) -> None:
    """Remove a model. Running requests finish first."""
    _send_order(common, url, admin_key, "remove", model=model)


@app.command()
@declare()
def down(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """Stop the servers and the gateway of a fleet."""
    _connect(common, url, admin_key).call("/fleet/down", {})
    common.out.print_success("Stopped the fleet")


def _send_order(common: Common, url: str | None, key: str | None, method: str, **fields: Any) -> None:
    document = _connect(common, url, key).call("/fleet/order", {"method": method, **fields})
    if common.out.format == "json":
        common.out.print_result(document, "")


def _connect(common: Common, url: str | None, key: str | None) -> "ServerClient":
    """Return a client of the fleet. If `url` is None, use the address and the admin key of this user's fleet."""
    from coldstart.commands._client import FLEET, ServerClient

    from coldstart.fleet.live import local_state

    if url is None or key is None:
        local = local_state.require_fleet() if url is None else local_state.read_fleet()
        if local is not None and url in (None, local.url):
            url, key = local.url, key or local.admin_key
    headers = {HEADER: key} if key else {}
    return ServerClient(url or "", headers, common.out, wait_s=60, service=FLEET)


def render(status: Mapping[str, Any]) -> str:
    """Format the status of a fleet as text."""
    gateway = status["gateway"]
    error = gateway.get("client_keys_error")
    keys_error = f"client keys not applied, the previous keys remain valid: {error}" if error else ""
    lines = [
        f"{gateway['url']}  pid {gateway['pid']}, up {gateway['uptime_s']:.0f} s, requests {gateway['requests']}, "
        f"waiting {gateway['held']}, in flight {gateway['in_flight']}, readmitted {gateway['readmitted']}, "
        f"rejected {sum(gateway['refused'].values())}",
        *filter(None, [keys_error]),
    ]
    for server in status["servers"]:
        free = ", ".join(map(format_bytes, server["free_bytes"]))
        draining = "  draining" if server["draining"] else ""
        observed = server.get("observed_bytes_s")
        link = f"link {format_bytes(server['network_bytes_s'])}/s configured"
        link += f", {format_bytes(observed)}/s observed" if observed else ""
        lines.append(
            f"server {server['name']}: free {free} of {format_bytes(server['memory_bytes'])}, {link}{draining}"
        )
    lines += [
        f"server {name} cannot be used: {reason}" for name, reason in status.get("unusable", {}).items()
    ]
    for model in status["models"]:
        error = f"  {model['error']}" if model["error"] else ""
        lines.append(
            f"model {model['name']}: {model['least']} to {model['most']} workers, waiting {model['waiting']}{error}"
        )
        for model_group in model["groups"]:
            lines += _format_group(model_group)
    return "\n".join(map(escape_line, lines))


def _format_group(group: Mapping[str, Any]) -> list[str]:
    places = ", ".join(f"{worker['server']}:{worker['device']}" for worker in group["workers"])
    start = f", {group['mode']} in {group['start_s']:.2f} s" if group["mode"] else ""
    load = f"in flight {group['in_flight']} of {group['capacity']}"
    line = f"  {group['name']} {group['phase']} on {places}: {load}{start}"
    return [line, f"    {group['choice']}"] if group.get("choice") else [line]
