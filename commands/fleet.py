"""Serve models on many servers, which run Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._options import Common, Model, OnMissing, group, option
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, one_line

from coldstart.errors import UsageError
from coldstart.fleet.specification import FleetSettings
from coldstart.host.endpoint import GatewayEndpoint

if TYPE_CHECKING:
    from coldstart.commands._client import ServerClient

    from coldstart.fleet.live.local_state import LocalFleet
    from coldstart.fleet.specification import ServerSpec

# Nothing here imports Ray.
app = group(__doc__)
HEADER = "x-coldstart-admin-key"
_URL = option("--url", metavar="URL", help="URL of the gateway; default: this user's fleet on this machine.")
_KEY = option(
    "--admin-key", metavar="KEY", help="Admin key of the fleet; default: the saved key of this user's fleet."
)
Url = Annotated[str | None, _URL]
Key = Annotated[str | None, _KEY]
NewKey = Annotated[
    str | None,
    option("--admin-key", metavar="KEY", help="Admin key of the fleet; default: a new random key."),
]
Memory = Annotated[
    str | None,
    option("--memory", metavar="SIZE", help="Memory for models on each GPU of this machine, such as 60GiB."),
]
Devices = Annotated[int, option("--devices", metavar="N", help="Number of GPUs of this machine to use.")]
Network = Annotated[
    str, option("--network", metavar="SIZE", help="Network bandwidth of this machine in bytes per second.")
]
Load = Annotated[
    str, option("--load", metavar="SIZE", help="Bandwidth from CPU memory to a GPU, in bytes per second.")
]


@app.command()
@declare(listens=True, sets=FleetSettings(max_held=1024))
def up(
    common: Common,
    endpoint: GatewayEndpoint,
    settings: dict[str, Any],
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
    address: Annotated[
        str | None,
        option(
            "--address",
            metavar="HOST:PORT",
            help="Address of an existing Ray cluster; default: start one here.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        option(
            "--state", metavar="FILE", help="File that retains the deployments over restarts; default: none."
        ),
    ] = None,
    admin_key: NewKey = None,
) -> None:
    """Run the gateway of a fleet. Uses a new or an existing Ray cluster."""
    from coldstart.fleet.live import ray_process

    ray_process.require_ray()
    if address is not None and memory is not None:
        raise UsageError(
            "--memory applies to a Ray cluster that this command starts, not to the one at --address",
            hint="coldstart fleet join ADDRESS --memory 60GiB",
        )
    server = None if memory is None else _server(memory, devices, network, load)

    from coldstart.fleet.live.run import FleetUp
    from coldstart.host.live.log import Log

    def announce(place: "LocalFleet") -> None:
        said = {"url": place.url, "ray": place.ray}
        common.out.result(said, f"{place.url}  gateway of a fleet, Ray at {place.ray}")

    fleet = FleetUp(
        common.cache,
        FleetSettings(**settings),
        Log(quiet=common.out.quiet),
        announce,
        state=state.absolute() if state else None,
        server=server,
        address=address,
        endpoint=endpoint,
        admin_key=admin_key,
        offline=common.offline,
    )
    raise typer.Exit(fleet.run())


@app.command()
@declare()
def join(
    common: Common,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]", help="Address of the fleet's Ray cluster; default: this user's fleet."
        ),
    ] = None,
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
) -> None:
    """Make this machine a server of a fleet."""
    from coldstart.contract import environment
    from coldstart.fleet.live import local_state, ray_process
    from coldstart.host.live.log import Log

    ray_process.require_ray()
    if memory is None:
        raise UsageError("--memory is missing: the memory for models on each device", hint="--memory 60GiB")
    server = _server(memory, devices, network, load)
    known = local_state.load() if address else local_state.require()
    env = {str(environment.CACHE_DIR): str(common.cache.root)}
    if known is not None and known.token and known.ray == (address or known.ray):
        env["RAY_AUTH_TOKEN"] = known.token
    command = ray_process.joining(server, address or local_state.require().ray)
    ray_process.run_joined(command, env, Log(quiet=common.out.quiet))


def _server(memory: str, devices: int, network: str, load: str) -> "ServerSpec":
    from coldstart.fleet.specification import ServerSpec
    from coldstart.units import parse_size, require_unit

    size = parse_size(memory)
    require_unit(memory, "--memory", hint=f"--memory {memory.strip()}MiB")
    return ServerSpec("here", size, float(parse_size(network)), float(parse_size(load)), devices)


@app.command()
@declare(takes_vllm_args=True)
def deploy(
    common: Common,
    model: Model,
    least: Annotated[int, option("--min", metavar="N", help="Minimum number of workers.")] = 0,
    most: Annotated[int, option("--max", metavar="N", help="Maximum number of workers.")] = 1,
    slo: Annotated[
        str | None,
        option(
            "--slo",
            metavar="METRIC=S",
            help="Limits in seconds that the placement must meet, such as ttft=2,tpot=0.1.",
        ),
    ] = None,
    idle: Annotated[
        float, option("--idle", metavar="SECONDS", help="Time without a request after which a worker stops.")
    ] = 600.0,
    name: Annotated[
        str | None, option("--name", metavar="NAME", help="Model name in requests; default: MODEL.")
    ] = None,
    batch: Annotated[
        int, option("--batch", metavar="N", help="Maximum number of concurrent requests of a worker.")
    ] = 64,
    memory: Annotated[
        str | None,
        option(
            "--memory",
            metavar="SIZE",
            help="Device memory of a worker; default: from its bundle.",
        ),
    ] = None,
    size: Annotated[
        str | None, option("--size", metavar="SIZE", help="Size of the weights; default: from the files.")
    ] = None,
    start: Annotated[
        float | None,
        option(
            "--start",
            metavar="SECONDS",
            help="Duration of a start without loading the weights, in seconds; default: as its bundle records.",
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        option(
            "--weights-from",
            metavar="SOURCE",
            help="Source for servers without the weights: http(s)://..., s3://... or hf://REPO@REV.",
        ),
    ] = None,
    on_miss: OnMissing = "fail",
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Deploy a model to the fleet. Arguments after -- go to vLLM."""
    from coldstart.fleet.live import deployments, state
    from coldstart.host.launches import Launch

    launch = Launch(name or model, model, common.vllm_args, on_miss=on_miss, weights_from=weights_from)
    made = deployments.build_deployment(
        launch,
        common.cache,
        offline=common.offline,
        workers=(least, most),
        slo=deployments.parse_limits(slo),
        idle_s=idle,
        batch=batch,
        memory=memory,
        size=size,
        start_s=start,
    )
    _ordered(common, url, admin_key, "deploy", deployment=state.encode(made))
    common.out.success(f"Deployed {made.spec.name}", then="coldstart fleet status")


@app.command()
@declare()
def status(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """Show servers, models and workers."""
    found = _connect(common, url, admin_key).call("/fleet/status", members={"gateway", "models"})
    common.out.result(found, lambda: render(found))


@app.command()
@declare()
def scale(
    common: Common,
    model: str,
    least: Annotated[int, option("--min", metavar="N", help="Minimum number of workers.")],
    most: Annotated[int, option("--max", metavar="N", help="Maximum number of workers.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Change the number of workers of a model."""
    _ordered(common, url, admin_key, "scale", model=model, least=least, most=most)


@app.command()
@declare()
def drain(
    common: Common,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="Name of the server in `fleet status`.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Start nothing more on a server. Its workers finish and stop."""
    _ordered(common, url, admin_key, "drain", server=server)


@app.command()
@declare()
def remove(common: Common, model: str, url: Url = None, admin_key: Key = None) -> None:
    """Remove a model after its running requests."""
    _ordered(common, url, admin_key, "remove", model=model)


@app.command()
@declare()
def down(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """End a fleet. Stops the servers and the gateway."""
    _connect(common, url, admin_key).call("/fleet/down", {})
    common.out.success("Ended the fleet")


def _ordered(common: Common, url: str | None, key: str | None, method: str, **members: Any) -> None:
    found = _connect(common, url, key).call("/fleet/order", {"method": method, **members})
    if common.out.format == "json":
        common.out.result(found, "")


def _connect(common: Common, url: str | None, key: str | None) -> "ServerClient":
    """Return a client of the fleet, by default with the address and the admin key of this user's fleet."""
    from coldstart.commands._client import FLEET, ServerClient

    from coldstart.fleet.live import local_state

    if url is None or key is None:
        known = local_state.require() if url is None else local_state.load()
        if known is not None and url in (None, known.url):
            url, key = known.url, key or known.admin_key
    headers = {HEADER: key} if key else {}
    return ServerClient(url or "", headers, common.out, wait_s=60, service=FLEET)


def render(status: Mapping[str, Any]) -> str:
    """Return the status as plain text."""
    gateway = status["gateway"]
    keys = gateway.get("client_keys_error")
    refused = f"client keys not applied, the former ones remain: {keys}" if keys else ""
    lines = [
        f"{gateway['url']}  pid {gateway['pid']}, up {gateway['uptime_s']:.0f} s, requests {gateway['requests']}, "
        f"waiting {gateway['held']}, in flight {gateway['in_flight']}, readmitted {gateway['readmitted']}, "
        f"rejected {sum(gateway['refused'].values())}",
        *filter(None, [refused]),
    ]
    for server in status["servers"]:
        free = ", ".join(map(human_bytes, server["free_bytes"]))
        draining = "  draining" if server["draining"] else ""
        seen = server.get("observed_bytes_s")
        link = f"link {human_bytes(server['network_bytes_s'])}/s configured"
        link += f", {human_bytes(seen)}/s observed" if seen else ""
        lines.append(
            f"server {server['name']}: free {free} of {human_bytes(server['memory_bytes'])}, {link}{draining}"
        )
    lines += [
        f"server {name} cannot be used: {reason}" for name, reason in status.get("unusable", {}).items()
    ]
    for model in status["models"]:
        error = f"  {model['error']}" if model["error"] else ""
        lines.append(
            f"model {model['name']}: {model['least']} to {model['most']} workers, waiting {model['waiting']}{error}"
        )
        for one in model["groups"]:
            lines += _group(one)
    return "\n".join(map(one_line, lines))


def _group(group: Mapping[str, Any]) -> list[str]:
    where = ", ".join(f"{worker['server']}:{worker['device']}" for worker in group["workers"])
    came = f", {group['mode']} in {group['start_s']:.2f} s" if group["mode"] else ""
    line = f"  {group['name']} {group['phase']} on {where}: in flight {group['in_flight']} of {group['capacity']}{came}"
    return [line, f"    {group['choice']}"] if group.get("choice") else [line]
